"""Checkpoints of servers: each writes its shards, and any number of servers reads them again.

::

    folder/step-000120/server-0.pt, server-1.pt   shards with their rows, states, step
    folder/step-000120/checkpoint.json            layout, version, applied pushes: written last
    folder/latest                                 the name of the newest complete one
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outsize.errors import TrainingError
from outsize.runtime.parameter_server.applied_pushes import AppliedPushes
from outsize.runtime.parameter_server.layout import Layout, Shard, Variable
from outsize.runtime.parameter_server.shard_storage import ShardStorage, ShardValues

__all__ = [
    "CheckpointInfo",
    "latest_checkpoint",
    "load_shards",
    "load_variables",
    "publish_checkpoint",
    "read_info",
    "save_shards",
]

_MANIFEST, _LATEST = "checkpoint.json", "latest"


@dataclass(frozen=True)
class CheckpointInfo:
    """What a complete checkpoint says about itself."""

    layout: Layout
    version: int
    applied: AppliedPushes


def save_shards(folder: Path, server: int, storage: ShardStorage) -> None:
    """Write the shards of one server. The caller keeps updates away."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [
        {"variable": shard.variable.name, "first_row": shard.first_row, "num_rows": shard.num_rows}
        | {name: tensor.clone() for name, tensor in storage.values_of(shard).items()}
        for shard in storage.shards
    ]
    torch.save(shards, folder / f"server-{server}.pt")


def publish_checkpoint(folder: Path, info: CheckpointInfo) -> None:
    """Declare a folder complete, and the newest of its parent. Call it after every server has saved."""
    data = {
        "layout": info.layout.to_json(),
        "version": info.version,
        "applied": [info.applied.watermark, *sorted(info.applied.newer)],
    }
    (folder / _MANIFEST).write_text(json.dumps(data))
    pointer = folder.parent / f"{_LATEST}.new"
    pointer.write_text(folder.name)
    pointer.replace(folder.parent / _LATEST)


def latest_checkpoint(parent: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    try:
        return parent / (parent / _LATEST).read_text()
    except FileNotFoundError:
        return None


def read_info(folder: Path) -> CheckpointInfo:
    """Return what a checkpoint says about itself.

    Raises:
        TrainingError: it is not a complete checkpoint.
    """
    try:
        data = json.loads((folder / _MANIFEST).read_text())
        watermark, *newer = data["applied"]
        return CheckpointInfo(
            Layout.from_json(data["layout"]), data["version"], AppliedPushes(watermark, newer)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{folder} is not a complete checkpoint", why=repr(error), attempt="use the one named by 'latest'"
        ) from None


def load_shards(folder: Path, storage: ShardStorage) -> None:
    """Fill a server's shards with their rows, whichever servers wrote them.

    Files are mapped, not read: of each, only the rows that this server holds are touched.

    Raises:
        TrainingError: the checkpoint lacks rows of a variable, or has another shape.
    """
    missing = {shard: shard.num_rows for shard in storage.shards}
    for saved in _saved_shards(folder):
        for shard in storage.shards:
            if shard.variable.name == saved["variable"]:
                missing[shard] -= _copy_overlap(shard, storage.values_of(shard), saved)
    incomplete = [shard.variable.name for shard, num_rows in missing.items() if num_rows]
    if incomplete:
        raise TrainingError(
            f"{folder} lacks rows of {', '.join(sorted(set(incomplete)))}",
            attempt="load it with the model that wrote it",
        )


def load_variables(folder: Path) -> dict[str, ShardValues]:
    """Return whole variables by name: ``value``, optimizer states and ``step``.

    Raises:
        TrainingError: the checkpoint is incomplete.
    """
    layout = read_info(folder).layout
    found: dict[str, ShardValues] = {}
    for saved in _saved_shards(folder):
        variable = layout.variable(saved["variable"])
        whole = found.setdefault(variable.name, _empty_like(saved, variable))
        target = Shard(variable, 0, 0, variable.num_rows, 0)
        _copy_overlap(target, whole, saved)
    return found


def _empty_like(saved: dict[str, Any], variable: Variable) -> ShardValues:
    tensors = {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}
    return {
        name: torch.zeros_like(value) if name == "step" else value.new_zeros(variable.shape)
        for name, value in tensors.items()
    }


def _saved_shards(folder: Path) -> Iterator[dict[str, Any]]:
    for server in range(read_info(folder).layout.num_servers):
        path = folder / f"server-{server}.pt"
        try:
            yield from torch.load(path, mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise TrainingError(f"{path} cannot be read", why=str(error).splitlines()[0]) from None


def _copy_overlap(shard: Shard, target: ShardValues, saved: dict[str, Any]) -> int:
    """Copy the rows that both have and return how many."""
    first: int = max(shard.first_row, saved["first_row"])
    end: int = min(shard.first_row + shard.num_rows, saved["first_row"] + saved["num_rows"])
    if end <= first:
        return 0
    for name, tensor in target.items():
        if name not in saved:
            continue
        if name == "step" or not shard.variable.shape:
            tensor.copy_(saved[name])
        else:
            rows = saved[name][first - saved["first_row"] : end - saved["first_row"]]
            if rows.shape[1:] != tensor.shape[1:]:
                raise TrainingError(
                    f"{shard.variable.name} has shape {tuple(rows.shape)} in the checkpoint, not this model's"
                )
            tensor[first - shard.first_row : end - shard.first_row].copy_(rows)
    return end - first
