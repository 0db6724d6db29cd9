"""Seconds that computing takes on one device: a roofline with one efficiency a device and operator kind.

A matrix product of local sizes M x K x N takes

    2 M K N / (rate · share)  +  (M K + K N + M N) · bytes / (bandwidth · share)

so small sizes run slower, the more so the faster a device computes for its memory. Its backward is two such
products, of which the weights' adds its result to the gradients. Fused attention runs at a share of the
matrix rate, everything else at a share of the memory bandwidth. The shares belong to a device kind and an
operator kind, never to a model.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from outsize.cluster.device import Device
from outsize.cost.precision import element_bytes
from outsize.model.profile import BlockProfile, OperatorProfile

__all__ = ["BlockTimes", "Conditions", "Efficiency", "Shards", "efficiency_of", "estimate_block_s"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet's figures that a kind of device reaches."""

    matmul: float  # of the matrix rate, for large sizes
    matmul_fp8: float  # the same in 8 bits
    attention: float  # of the matrix rate, in forward
    attention_backward: float  # of the matrix rate, in backward
    bandwidth: float  # of the memory bandwidth
    kernel_s: float  # the host needs to start an operator's kernels: a block takes at least their sum


@dataclass(frozen=True, slots=True)
class Shards:
    """Into how many parts operators are divided, by what they divide."""

    tensor: int = 1
    sequence: int = 1  # sequence-split norms and residuals; equals ``tensor`` or 1
    context: int = 1
    expert: int = 1


@cache
def _curves() -> dict[str, Efficiency]:
    text = files("outsize.cost").joinpath("efficiency.toml").read_text(encoding="utf-8")
    curves = {}
    for family, figures in tomllib.loads(text).items():
        curve = Efficiency(**{name: value for name, value in figures.items() if name != "devices"})
        curves.update(dict.fromkeys([family, *figures.get("devices", [])], curve))
    return curves


def efficiency_of(device: Device) -> Efficiency:
    """Return the efficiency of the device's kind, or that of accelerators in general."""
    curves = _curves()
    return curves.get(device.kind, curves["accelerator"])


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a block is computed on and in: device, precision, samples of a micro-batch, shards.

    ``scale`` is the element size of the precision over that of the profile's byte figures;
    ``gradient_bytes`` are those of a gradient that is accumulated.
    """

    device: Device
    precision: str
    num_samples: float
    shards: Shards
    scale: float
    gradient_bytes: float = 2.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second that passes over memory reach."""
        return self.device.memory_bandwidth_bytes_per_s * efficiency_of(self.device).bandwidth

    @property
    def matmul_rate(self) -> float:
        """FLOP/s that large matrix products reach."""
        curve = efficiency_of(self.device)
        return self.device.rate(self.precision) * (
            curve.matmul_fp8 if self.precision == "fp8" else curve.matmul
        )


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds of one block's forward and backward, and the part of backward that makes weights' gradients."""

    forward_s: float
    backward_s: float
    weight_s: float


def estimate_block_s(block: BlockProfile, conditions: Conditions) -> BlockTimes:
    """Return the times of one block for one micro-batch."""
    if not block.operators:
        return _whole_block_s(block, conditions)
    times = [_operator_s(operator, conditions) for operator in block.operators]
    launches = sum(_num_launches(operator, conditions) for operator in block.operators)
    launched = launches * efficiency_of(conditions.device).kernel_s
    forward, backward, weight = (sum(column) for column in zip(*times, strict=True))
    return BlockTimes(max(forward, launched), max(backward, 1.5 * launched), weight)


def _num_launches(operator: OperatorProfile, conditions: Conditions) -> float:
    """Kernels of an operator: one an expert on this device; in 8 bits another to quantise the input."""
    if operator.kind != "matmul":
        return 1.0
    each = 2.0 if conditions.precision == "fp8" else 1.0
    return each * max(operator.num_experts / conditions.shards.expert, 1.0)


def _whole_block_s(block: BlockProfile, conditions: Conditions) -> BlockTimes:
    """Roofline of the block's totals, where its operators are not known one by one."""
    shards, samples, rate = conditions.shards, conditions.num_samples, conditions.matmul_rate
    split = block.shardable_flops_fraction / shards.tensor + 1 - block.shardable_flops_fraction
    traffic = block.bytes_moved.of(samples) * conditions.scale * split / shards.context
    traffic_s = traffic / conditions.bandwidth
    forward = block.forward_flops.of(samples) * split / shards.context / rate
    backward = block.backward_flops.of(samples) * split / shards.context / rate
    return BlockTimes(forward + traffic_s, backward + 2 * traffic_s, backward / 2 + traffic_s)


def _operator_s(operator: OperatorProfile, conditions: Conditions) -> tuple[float, float, float]:
    """Seconds of forward, backward, and of backward the weights' gradient."""
    if operator.kind == "matmul":
        return _matmul_s(operator, conditions)
    samples, device = conditions.num_samples, conditions.device
    divided = _divisor(operator, conditions.shards)
    traffic = operator.bytes_moved.of(samples) * conditions.scale / divided
    traffic_s = traffic / conditions.bandwidth
    if operator.kind == "elementwise":
        return traffic_s, 1.5 * traffic_s, 0.0
    flops = operator.forward_flops.of(samples) / divided
    rate = device.rate("bf16" if conditions.precision == "fp8" else conditions.precision)
    curve = efficiency_of(device)
    if operator.kind == "scores":
        time = flops / (rate * curve.matmul) + traffic_s
        return time, 2 * time, 0.0
    return flops / (rate * curve.attention), 2.0 * flops / (rate * curve.attention_backward), 0.0


def _matmul_s(operator: OperatorProfile, conditions: Conditions) -> tuple[float, float, float]:
    """Roofline of a product with weights and of the two products of its backward."""
    shards = conditions.shards
    experts = max(operator.num_experts / shards.expert, 1.0)  # on this device
    # Devices that share experts send each other tokens: as many in all, more for each expert.
    rows = operator.rows.of(conditions.num_samples) * operator.num_experts / shards.context
    inner = operator.inner / (shards.tensor if operator.split == "rows" else 1)
    columns = operator.columns / (shards.tensor if operator.split == "columns" else 1)
    width = float(element_bytes(conditions.precision))
    narrow = 1.0 if conditions.precision == "fp8" else width
    weights = experts * inner * columns
    product_s = 2.0 * rows * inner * columns / conditions.matmul_rate
    forward = rows * inner * narrow + weights * narrow + rows * columns * width
    through = rows * columns * narrow + weights * narrow + rows * inner * width
    accumulated = rows * (inner + columns) * narrow + 2 * weights * conditions.gradient_bytes
    if conditions.precision == "fp8":  # written twice in 8 bits, transposed too; gradients are read first
        forward += 2 * rows * inner
        through += 4 * rows * columns
    weight_s = product_s + accumulated / conditions.bandwidth
    backward_s = product_s + through / conditions.bandwidth + weight_s
    return product_s + forward / conditions.bandwidth, backward_s, weight_s


def _divisor(operator: OperatorProfile, shards: Shards) -> float:
    by_split = {
        "columns": shards.tensor,
        "rows": shards.tensor,
        "heads": shards.tensor,
        "tokens": shards.sequence,
    }
    return by_split.get(operator.split, 1) * shards.context
