"""What a checkpoint says of itself, in ``checkpoint.json``, and whether its files are whole.

{"format_version": 1, "step": 120, "files": {"shard-00001-....safetensors": 16777344, ...}}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch.distributed.checkpoint.metadata import Metadata

from outsize.errors import LaunchError, PlanError
from outsize.runtime.checkpoint_storage import reader

__all__ = [
    "DESCRIPTION",
    "FORMAT_VERSION",
    "complete_checkpoints",
    "damaged_checkpoint",
    "read_description",
    "read_metadata",
    "write_description",
]

FORMAT_VERSION = 1
DESCRIPTION = "checkpoint.json"
_TENSORS = "*.safetensors"


def write_description(folder: Path, step: int) -> None:
    """Write what makes the checkpoint complete, when all files with tensors are in ``folder``."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob(_TENSORS))}
    description = {"format_version": FORMAT_VERSION, "step": step, "files": sizes}
    (folder / DESCRIPTION).write_text(json.dumps(description) + "\n")


def read_description(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself; ``step`` is a number of steps.

    Raises:
        LaunchError: the file is damaged.
        PlanError: it has another format version.
    """
    path = checkpoint / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged_checkpoint(checkpoint, f"{path} is not readable JSON: {error}") from None
    if not isinstance(description, dict) or "format_version" not in description:
        raise damaged_checkpoint(checkpoint, f"{path} has no format_version.")
    if description["format_version"] != FORMAT_VERSION:
        raise PlanError(
            f"The checkpoint {checkpoint} has format version {description['format_version']!r}.",
            why=f"This version of outsize reads {FORMAT_VERSION}.",
            attempt="the version of outsize that wrote it.",
        )
    step = description.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise damaged_checkpoint(checkpoint, f"{path} gives {step!r} as its number of steps.")
    return description


def read_metadata(checkpoint: Path) -> Metadata:
    """Return names, shapes and places of all tensors, after a look at every file.

    Raises:
        LaunchError: a file is missing, cut short or damaged.
        PlanError: the checkpoint has another format version.
    """
    sizes = read_description(checkpoint).get("files", {})  # servers do not list them
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            raise damaged_checkpoint(checkpoint, f"{path} is missing.")
        if path.stat().st_size != size:
            found = path.stat().st_size
            raise damaged_checkpoint(checkpoint, f"{path} has {found} bytes; {size} were written.")
    for path in sorted(checkpoint.glob(_TENSORS)):
        _check_header(checkpoint, path)
    return reader(checkpoint).read_metadata()


def _check_header(checkpoint: Path, path: Path) -> None:
    """Refuse a file whose header does not tell where its tensors lie, or that is shorter than it says."""
    try:
        with safe_open(path, framework="pt") as file:
            placed = json.loads((file.metadata() or {})["DCP_SHARDING_INFO"])
            lost = [name for name in file.keys() if "saved_offsets" not in placed[name]]  # noqa: SIM118
    except Exception as error:  # safetensors' own errors derive from nothing narrower
        raise damaged_checkpoint(
            checkpoint, f"{path} is cut short or garbled ({type(error).__name__}: {error})."
        ) from None
    if lost:
        raise damaged_checkpoint(checkpoint, f"{path} does not say where {lost[0]} belongs.")


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints below ``folder``, oldest first."""
    found = (path.parent for path in folder.glob(f"step-*/{DESCRIPTION}"))
    return sorted(path for path in found if path.suffix != ".partial")


def damaged_checkpoint(checkpoint: Path, problem: str) -> LaunchError:
    """Return the error for a checkpoint that cannot be read; it names another one, if there is one."""
    others = [path for path in complete_checkpoints(checkpoint.parent) if path != checkpoint]
    earlier = [path for path in others if path.name < checkpoint.name]
    attempt = "a copy of that file, or training from the start."
    if others:
        other = (earlier or others)[-1]
        pointer = checkpoint.parent / "latest"
        attempt = f"the checkpoint {other}: load it by that path, or write {other.name} into {pointer}."
    return LaunchError(f"The checkpoint {checkpoint} is damaged.", why=problem, attempt=attempt)
