"""Embedding tables that workers of parameter servers never hold: chosen by name, left out of a profile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from outsize.model.deferred import build_deferred
from outsize.model.profile import Amount, BlockProfile, ModelProfile
from outsize.model.source import ModelSource

__all__ = ["matching_names", "without_tables"]


def matching_names(names: Collection[str], patterns: str) -> dict[str, list[str]]:
    """Return the names that each of the comma-separated ``patterns`` (with wildcards) fits."""
    split = [pattern.strip() for pattern in patterns.split(",")]
    return {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in split}


def without_tables(profile: ModelProfile, source: ModelSource, patterns: str) -> ModelProfile:
    """Return the profile without the embeddings whose weights have these names.

    Raises:
        ModelError: the model cannot be built.
    """
    module = build_deferred(source.factory).module
    tables = {
        f"{path}.weight" if path else "weight": part.weight
        for path, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    }
    chosen = {name for names in matching_names(tables, patterns).values() for name in names}
    sizes = {name: (tables[name].numel(), tables[name].element_size()) for name in chosen}
    return replace(profile, blocks=tuple(_without(block, sizes) for block in profile.blocks))


def _without(block: BlockProfile, sizes: Mapping[str, tuple[int, int]]) -> BlockProfile:
    """The block without tables: neither their values, nor their whole gradients, which are temporaries."""
    own = [sizes[name] for name in block.parameter_names if name in sizes]
    count, num_bytes = sum(each for each, _ in own), sum(each * size for each, size in own)
    if not count:
        return block
    return replace(
        block,
        num_parameters=block.num_parameters - count,
        num_trainable_parameters=max(0, block.num_trainable_parameters - count),
        parameter_bytes=block.parameter_bytes - num_bytes,
        num_largest_parameter=0,
        parameter_names=tuple(name for name in block.parameter_names if name not in sizes),
        temporary_bytes=_less(block.temporary_bytes, num_bytes),
        bytes_moved=_less(block.bytes_moved, num_bytes),
    )


def _less(amount: Amount, fixed: float) -> Amount:
    return replace(amount, fixed=max(0.0, amount.fixed - fixed))
