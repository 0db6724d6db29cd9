"""Saves and loads a model's state by full names, so that a run can go on under any other plan.

<folder>/latest                 the name of the newest complete checkpoint
<folder>/step-00000120/         *.safetensors and checkpoint.json
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from outsize.errors import LaunchError, PlanError
from outsize.runtime.checkpoint_entry import CheckpointEntry, EntryLoadPlanner, EntrySavePlanner
from outsize.runtime.checkpoint_storage import reader, writer

__all__ = ["find_checkpoint", "load_entries", "save_entries", "saved_names"]

FORMAT_VERSION = 1
_DESCRIPTION = "checkpoint.json"


def save_entries(folder: Path, step: int, entries: Mapping[str, CheckpointEntry]) -> Path:
    """Write what every process holds as ``folder/step-...`` and return that path.

    Called on every process together. The checkpoint gets its name, and ``latest`` moves to it, only when all
    processes have written all they hold; one that was interrupted is never taken for complete.
    """
    final = folder / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    if _is_first():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    with _without_warning():
        save(dict(entries), storage_writer=writer(partial), planner=EntrySavePlanner())
    _barrier()
    if _is_first():
        description = {"format_version": FORMAT_VERSION, "step": step}
        (partial / _DESCRIPTION).write_text(json.dumps(description) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        pointer = folder / "latest.partial"
        pointer.write_text(final.name + "\n")
        pointer.replace(folder / "latest")
    _barrier()
    return final


def find_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint below ``folder``, or ``folder`` itself if it is one.

    Raises:
        LaunchError: there is none.
    """
    if (folder / _DESCRIPTION).is_file():
        return folder
    pointer = folder / "latest"
    if pointer.is_file():
        found = folder / pointer.read_text().strip()
        if found.parent == folder and (found / _DESCRIPTION).is_file():
            return found
    raise LaunchError(
        f"There is no checkpoint in {folder}.",
        why="A checkpoint is complete when its folder holds checkpoint.json and `latest` names it.",
        attempt="another folder, or training from the start.",
    )


def saved_names(checkpoint: Path) -> set[str]:
    """Return the names of all tensors in a checkpoint."""
    return set(reader(checkpoint).read_metadata().state_dict_metadata)


def load_entries(checkpoint: Path, entries: Mapping[str, CheckpointEntry]) -> int:
    """Fill the entries from a checkpoint made under any plan, and return its step.

    Raises:
        PlanError: the checkpoint is of another model or optimizer: what is missing or has another shape.
    """
    description = json.loads((checkpoint / _DESCRIPTION).read_text())
    if description.get("format_version") != FORMAT_VERSION:
        raise PlanError(
            f"The checkpoint {checkpoint} has format version {description.get('format_version')!r}.",
            why=f"This version of outsize reads {FORMAT_VERSION}.",
        )
    source = reader(checkpoint)
    _check_same(checkpoint, source.read_metadata().state_dict_metadata, entries)
    with _without_warning():
        load(dict(entries), storage_reader=source, planner=EntryLoadPlanner())
    return int(description["step"])


def _check_same(checkpoint: Path, saved: Mapping[str, Any], entries: Mapping[str, CheckpointEntry]) -> None:
    """Compare names and shapes before anything is read, so that a mistake changes nothing."""
    missing = [name for name in entries if name not in saved]
    other = [
        f"{name} is {list(saved[name].size)} there and {list(entry.whole_shape)} here"
        for name, entry in entries.items()
        if name in saved and saved[name].size != entry.whole_shape
    ]
    problems = [f"{name} is not in it" for name in missing] + other
    if problems:
        raise PlanError(
            f"The checkpoint {checkpoint} does not belong to this model and optimizer.",
            why="; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""),
            attempt="the model and optimizer it was saved from.",
        )


@contextmanager
def _without_warning() -> Iterator[None]:
    """Keep torch from warning that one process saves alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_alone() -> bool:
    return not dist.is_initialized()


def _is_first() -> bool:
    return _is_alone() or dist.get_rank() == 0


def _barrier() -> None:
    if not _is_alone():
        dist.barrier()
