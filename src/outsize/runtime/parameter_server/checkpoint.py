"""Checkpoints of servers, in the format of all strategies: each server writes its shards as chunks.

::

    folder/step-00000120.partial/            server-0-00001.safetensors, coordinator-00001.safetensors, ...
    folder/step-00000120/checkpoint.json     the name, and this file, when every server has written
    folder/latest                            the name of the newest complete one

Any number of servers reads what any other number, or any other strategy, wrote.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outsize.runtime.checkpoint import FORMAT_VERSION, find_checkpoint, load_entries, saved_names
from outsize.runtime.checkpoint_description import damaged_checkpoint, read_description, read_metadata
from outsize.runtime.checkpoint_entry import CheckpointEntry, whole_entry
from outsize.runtime.checkpoint_part import write_part
from outsize.runtime.parameter_server.applied_pushes import AppliedPushes
from outsize.runtime.parameter_server.layout import Shard
from outsize.runtime.parameter_server.shard_storage import ShardStorage, ShardValues

__all__ = [
    "CheckpointInfo",
    "load_shards",
    "load_whole",
    "partial_folder",
    "publish_checkpoint",
    "read_info",
    "save_constants",
    "save_shards",
]

_MANIFEST, _LATEST = "checkpoint.json", "latest"


@dataclass(frozen=True)
class CheckpointInfo:
    """What a complete checkpoint says about itself.

    ``step`` counts steps of the global batch, as in every strategy. ``applied`` is empty unless servers wrote
    the checkpoint.
    """

    step: int
    applied: AppliedPushes


def partial_folder(parent: Path, step: int) -> Path:
    """Make and return the folder that a checkpoint has until it is complete; an interrupted one goes."""
    folder = parent / f"step-{step:08d}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def save_shards(folder: Path, server: int, storage: ShardStorage) -> None:
    """Write the shards of one server. The caller keeps updates away."""
    entries: dict[str, CheckpointEntry] = {}
    for shard in storage.shards:
        for name, tensor in _named_values(shard, storage.values_of(shard)).items():
            if _is_count(name, shard) and shard.part:
                continue  # it is the same for all shards of a variable
            entry = entries.setdefault(name, CheckpointEntry(_whole_shape(name, shard), {}))
            entry.chunks[_offset(name, shard)] = _with_rows(tensor)
    write_part(folder, f"server-{server}", entries)


def save_constants(folder: Path, constants: Mapping[str, torch.Tensor]) -> None:
    """Write what no server holds: frozen parameters and buffers, which training does not change."""
    write_part(folder, "coordinator", {name: whole_entry(tensor) for name, tensor in constants.items()})


def publish_checkpoint(partial: Path, info: CheckpointInfo) -> Path:
    """Give a folder its name, and make it the newest. Call it after every server has saved."""
    data = {
        "format_version": FORMAT_VERSION,
        "step": info.step,
        "applied": [info.applied.watermark, *sorted(info.applied.newer)],
    }
    (partial / _MANIFEST).write_text(json.dumps(data) + "\n")
    final = partial.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    pointer = final.parent / f"{_LATEST}.partial"
    pointer.write_text(final.name + "\n")
    pointer.replace(final.parent / _LATEST)
    return final


def read_info(folder: Path) -> CheckpointInfo:
    """Return what a checkpoint says about itself.

    Raises:
        LaunchError: it is not a complete checkpoint, or damaged.
        PlanError: it has another format version.
    """
    checkpoint = find_checkpoint(folder)
    description = read_description(checkpoint)
    applied = description.get("applied", [0])
    if not isinstance(applied, list) or not applied or not all(type(push) is int for push in applied):
        raise damaged_checkpoint(
            checkpoint, f"{checkpoint / _MANIFEST} gives {applied!r} as the pushes applied."
        )
    watermark, *newer = applied
    return CheckpointInfo(description["step"], AppliedPushes(watermark, newer))


def load_shards(folder: Path, storage: ShardStorage) -> int:
    """Fill a server's shards with their rows, whoever wrote them, and return the checkpoint's step.

    A variable that had no gradient when another strategy saved has no optimizer state there, and starts with
    zeros.

    Raises:
        PlanError: the checkpoint is of another model or optimizer; nothing was changed.
    """
    saved = saved_names(folder)
    entries: dict[str, CheckpointEntry] = {}
    counts: list[tuple[torch.Tensor, torch.Tensor]] = []  # a shard's count, and what was saved of it
    for shard in storage.shards:
        for name, held in _named_values(shard, storage.values_of(shard)).items():
            if name not in saved and _had_no_gradient(shard.variable.name, name, saved):
                continue
            entry = entries.setdefault(name, CheckpointEntry(_whole_shape(name, shard), {}))
            tensor = _with_rows(held)
            if _is_count(name, shard):
                tensor = entry.chunks.get(_offset(name, shard), torch.zeros_like(tensor))
                counts.append((held, tensor))
            entry.chunks[_offset(name, shard)] = tensor
    step = load_entries(folder, entries)
    _set_counts(counts)
    return step


def _set_counts(counts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Shards that share a count get the largest: other strategies do not count where there is no gradient."""
    for held, _ in counts:
        held.zero_()
    for held, saved in counts:
        torch.maximum(held, saved.view(held.shape), out=held)


def _had_no_gradient(variable: str, name: str, saved: set[str]) -> bool:
    """Whether a state is missing because the variable has none, though others have."""
    if name == variable or any(other.startswith(f"optimizer/{variable}/") for other in saved):
        return False
    return any(other.startswith("optimizer/") for other in saved)


def load_whole(folder: Path, *, only: set[str] | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, whole, by full name: all of them, or ``only`` those.

    Raises:
        LaunchError: the checkpoint is not complete.
        PlanError: one of ``only`` is not in it.
    """
    checkpoint = find_checkpoint(folder)
    metadata: dict[str, Any] = dict(read_metadata(checkpoint).state_dict_metadata)
    names = only if only is not None else {name for name in metadata if not name.startswith("optimizer/")}
    values = {
        name: torch.zeros(metadata[name].size, dtype=metadata[name].properties.dtype)
        for name in names & set(metadata)
    }
    missing = {name: whole_entry(torch.empty(0)) for name in names - set(metadata)}
    load_entries(checkpoint, {name: whole_entry(value) for name, value in values.items()} | missing)
    return values


def _named_values(shard: Shard, values: ShardValues) -> dict[str, torch.Tensor]:
    """Return value and optimizer states by the names that checkpoints give them; SGD counts no steps."""
    name = shard.variable.name
    has_step = "exp_avg" in values
    return {
        name if key == "value" else f"optimizer/{name}/{key}": tensor
        for key, tensor in values.items()
        if key != "step" or has_step
    }


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _is_count(name: str, shard: Shard) -> bool:
    return name == f"optimizer/{shard.variable.name}/step"


def _whole_shape(name: str, shard: Shard) -> torch.Size:
    shape = () if _is_count(name, shard) else shard.variable.shape
    return torch.Size(shape or [1])


def _offset(name: str, shard: Shard) -> torch.Size:
    first_row = 0 if _is_count(name, shard) else shard.first_row
    return torch.Size([first_row, *[0] * (len(_whole_shape(name, shard)) - 1)])
