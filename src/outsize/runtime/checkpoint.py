"""Saves and loads a model's state by full names, so that a run can go on under any other plan.

<folder>/latest                 the name of the newest complete checkpoint
<folder>/step-00000120/         *.safetensors and checkpoint.json
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from outsize.errors import LaunchError, PlanError
from outsize.runtime.checkpoint_description import (
    DESCRIPTION,
    FORMAT_VERSION,
    complete_checkpoints,
    damaged_checkpoint,
    read_description,
    read_metadata,
    write_description,
)
from outsize.runtime.checkpoint_entry import CheckpointEntry, EntryLoadPlanner, EntrySavePlanner
from outsize.runtime.checkpoint_storage import reader, writer

__all__ = ["FORMAT_VERSION", "find_checkpoint", "load_entries", "save_entries", "saved_names"]


def save_entries(folder: Path, step: int, entries: Mapping[str, CheckpointEntry]) -> Path:
    """Write what every process holds as ``folder/step-...`` and return that path.

    Called on every process together. The checkpoint gets its name, and ``latest`` moves to it, only when all
    processes have written all they hold; one that was interrupted is never taken for complete.

    Raises:
        LaunchError: it cannot be written; earlier ones are as they were.
    """
    final = folder / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    with _failures_told(lambda problem: _not_written(final, problem)):
        if _is_first():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier()
        save(dict(entries), storage_writer=writer(partial), planner=EntrySavePlanner())
        _barrier()
        if _is_first():
            write_description(partial, step)
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
    if (folder / DESCRIPTION).is_file():
        return folder
    pointer = folder / "latest"
    why = f"{pointer}, which names the newest complete one, is not there."
    if pointer.is_file():
        name = pointer.read_text(errors="replace").strip()
        found = folder / name
        if found.parent == folder and (found / DESCRIPTION).is_file():
            return found
        why = f"{pointer} names {name[:80]!r}, which is no complete checkpoint beside it."
    complete = complete_checkpoints(folder)
    raise LaunchError(
        f"There is no checkpoint in {folder}." if not complete else f"{folder} names no checkpoint.",
        why=why,
        attempt=f"write {complete[-1].name} into {pointer}: that one is complete."
        if complete
        else "another folder, or training from the start.",
    )


def saved_names(checkpoint: Path) -> set[str]:
    """Return the names of all tensors in a checkpoint.

    Raises:
        LaunchError: a file of it is damaged or missing.
        PlanError: it has another format version.
    """
    return set(read_metadata(checkpoint).state_dict_metadata)


def load_entries(checkpoint: Path, entries: Mapping[str, CheckpointEntry]) -> int:
    """Fill the entries from a checkpoint made under any plan, and return its step.

    Raises:
        LaunchError: a file of it is damaged or missing.
        PlanError: the checkpoint is of another model or optimizer: what is missing or has another shape.
    """
    step: int = read_description(checkpoint)["step"]
    _check_same(checkpoint, read_metadata(checkpoint).state_dict_metadata, entries)
    with _failures_told(lambda problem: damaged_checkpoint(checkpoint, problem)):
        load(dict(entries), storage_reader=reader(checkpoint), planner=EntryLoadPlanner())
    return step


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
    for name in entries:
        _check_covered(checkpoint, name, saved[name])


def _check_covered(checkpoint: Path, name: str, saved: Any) -> None:
    """Refuse a tensor of which a part is in no file: loading would leave that part as it was, in silence."""
    found = sum(chunk.sizes.numel() for chunk in saved.chunks)
    if found < saved.size.numel():
        raise damaged_checkpoint(
            checkpoint, f"Its files hold {found} of the {saved.size.numel()} elements of {name}."
        )


@contextmanager
def _failures_told(describe: Callable[[str], LaunchError]) -> Iterator[None]:
    """Turn what fails on any process while inside into one error; keep torch from warning that one process
    saves or loads alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise describe(f"On process {rank}: {type(cause).__name__}: {cause}") from error
        except OSError as error:
            raise describe(str(error)) from error


def _not_written(checkpoint: Path, problem: str) -> LaunchError:
    return LaunchError(
        f"The checkpoint {checkpoint} could not be written.",
        why=problem,
        attempt="space and rights to write there; checkpoints of earlier steps are as they were.",
    )


def _is_alone() -> bool:
    return not dist.is_initialized()


def _is_first() -> bool:
    return _is_alone() or dist.get_rank() == 0


def _barrier() -> None:
    if not _is_alone():
        dist.barrier()
