"""Small profiles, written down by hand, for planning without a model."""

from outsize.model.profile import Amount, BlockProfile, ModelProfile

__all__ = ["chain_profile", "uniform_block"]


def uniform_block(index: int, *, parameters: int = 1_000_000, **changes) -> BlockProfile:
    """Return a block of a transformer-like chain: 2 FLOPs a parameter and token of 64 tokens a sample."""
    flops = 2.0 * parameters * 64
    figures = {
        "name": f"layers.{index}",
        "kind": "layer",
        "num_parameters": parameters,
        "num_trainable_parameters": parameters,
        "parameter_bytes": 4 * parameters,
        "forward_flops": Amount(flops),
        "backward_flops": Amount(2 * flops),
        "bytes_moved": Amount(1e5),
        "saved_activation_bytes": Amount(4e5),
        "recompute_input_bytes": Amount(2e4),
        "temporary_bytes": Amount(5e4),
        "output_bytes": Amount(2e4),
        "cut_label": f"layers.{index}",
        "parameter_names": (f"layers.{index}.weight",),
        "shardable_parameter_fraction": 1.0,
        "shardable_activation_fraction": 0.8,
        "shardable_flops_fraction": 1.0,
        "num_forward_all_reduces": 2,
        "all_reduce_bytes": Amount(2e4),
        "max_tensor_parallel_degree": 8,
    }
    return BlockProfile(**{**figures, **changes})


def chain_profile(num_blocks: int = 8, **changes) -> ModelProfile:
    """Return a chain of equal blocks; ``changes`` apply to each."""
    blocks = tuple(uniform_block(index, **changes) for index in range(num_blocks))
    return ModelProfile("chain", blocks, tokens_per_sample=64)
