"""What a model costs, block by block, as plain numbers: all that planning needs.

A profile comes from a recorded program or from a preset's published configuration; it imports no
torch. Amounts that grow with the micro-batch are affine in the number of samples in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Amount", "BlockProfile", "ModelProfile", "OperatorProfile"]


@dataclass(frozen=True, slots=True)
class Amount:
    """``fixed + per_sample * num_samples`` of something, such as bytes or FLOPs."""

    per_sample: float = 0.0
    fixed: float = 0.0

    def of(self, num_samples: float) -> float:
        """Return the amount for a micro-batch of ``num_samples`` samples."""
        return self.fixed + self.per_sample * num_samples

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.per_sample + other.per_sample, self.fixed + other.fixed)

    def scaled(self, factor: float) -> Amount:
        """Return this amount times ``factor``."""
        return Amount(self.per_sample * factor, self.fixed * factor)


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """One matrix product, attention or element-wise pass inside a block's forward.

    A product with weights ("matmul") has ``rows`` (tokens) x ``inner`` x ``columns``; its traffic follows
    from these. "scores" are products without weights, whose traffic is ``bytes_moved``. ``split`` says which
    sizes operator-level parallelism divides: "columns", "rows" (the contracted size ``inner``), "heads",
    "tokens" (only where the sequence is split too) or "none".
    """

    kind: str  # "matmul", "scores", "attention" (fused) or "elementwise"
    forward_flops: Amount
    bytes_moved: Amount
    rows: Amount = Amount()
    inner: int = 0
    columns: int = 0
    split: str = "none"
    num_experts: int = 1  # products of these sizes, one an expert, which expert parallelism divides


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """One unit of the program that is never cut: a leaf block with the glue before the next one.

    ``cut_label`` names the cut just before this block (empty: not a legal cut). The ``tensor_parallel_*``
    figures say how the block shrinks when its operators are split: the fraction of parameters and of
    saved activations that is divided by the degree, and the bytes each collective moves.
    """

    name: str
    kind: str  # blocks of one kind are identical
    num_parameters: int
    num_trainable_parameters: int
    parameter_bytes: int
    forward_flops: Amount
    backward_flops: Amount
    bytes_moved: Amount  # memory traffic of the forward
    saved_activation_bytes: Amount  # kept from forward to backward, without recomputation
    recompute_input_bytes: Amount  # kept when the block is recomputed
    temporary_bytes: Amount  # highest extra memory while the block runs forward or backward
    output_bytes: Amount  # sent over a cut after this block
    cut_label: str = ""
    # kept from input gradients to weight gradients where backward runs in two parts: what products take and
    # the gradients of what they give
    weight_gradient_bytes: Amount = field(default_factory=Amount)
    buffer_bytes: int = 0
    parameter_names: tuple[str, ...] = ()
    tied_parameter_names: tuple[str, ...] = ()  # also used by an earlier block
    # operator-level parallelism
    shardable_parameter_fraction: float = 0.0
    shardable_activation_fraction: float = 0.0
    shardable_flops_fraction: float = 0.0
    num_forward_all_reduces: int = 0
    all_reduce_bytes: Amount = field(default_factory=Amount)  # each
    max_tensor_parallel_degree: int = 1
    # finer figures, where they are known
    num_largest_parameter: int = 0  # elements of the largest parameter; 0: not known
    num_tied_parameters: int = 0  # held once more if an earlier stage owns them
    operators: tuple[OperatorProfile, ...] = ()
    selective_saved_bytes: Amount | None = None  # kept when only attention scores are recomputed
    selective_recompute_flops: Amount = field(default_factory=Amount)
    selective_recompute_bytes: Amount = field(default_factory=Amount)  # memory traffic of the same
    context_exchange_bytes: Amount = field(default_factory=Amount)  # keys and values, passed round over cp
    matmul_input_fraction: float = 0.0  # of saved activations: kept in one byte when computing in fp8
    num_expert_parameters: int = 0  # divided by expert parallelism
    all_to_all_bytes: Amount = field(default_factory=Amount)  # each of two in forward, two in backward
    num_token_copies: int = 1  # experts each token is sent to; copies to one machine travel once
    max_machines_per_token: int = 0  # where routing keeps to so many machines; 0: no limit


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """All blocks of a model in execution order."""

    name: str
    blocks: tuple[BlockProfile, ...]
    tokens_per_sample: int = 1
    rung: str = "fake_tensors"
    rung_reason: str = ""  # why no better rung was reached
    fingerprint: str = ""
    bytes_per_element: int = 4  # of the floating-point values that the byte figures were taken with

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(block.num_parameters for block in self.blocks)
