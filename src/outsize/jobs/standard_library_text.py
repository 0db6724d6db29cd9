"""Real text that every machine has: the source files of the running Python's standard library, as bytes."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path

import torch

from outsize.errors import OutsizeError

__all__ = ["load_split", "sample_windows", "source_files"]

_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_VALIDATION_SHARE = 10  # one file in ten


def source_files(split: str) -> list[Path]:
    """Return the files of ``"train"`` or ``"validation"``, sorted; each file is in exactly one of them.

    Raises:
        OutsizeError: this Python ships its standard library without source files.
        ValueError: the split has another name.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is 'train' or 'validation', not {split!r}")
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not _EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    if not files:
        raise OutsizeError(
            f"no Python source files below {root}",
            why="the default job trains on the standard library's own source",
            attempt="use a Python that ships it, or train your own model with outsize train",
        )
    return [path for path in files if _is_validation(path.relative_to(root)) == (split == "validation")]


def _is_validation(relative_path: Path) -> bool:
    digest = hashlib.sha256(relative_path.as_posix().encode()).digest()
    return digest[0] % _VALIDATION_SHARE == 0


@functools.cache
def load_split(split: str) -> torch.Tensor:
    """Return all bytes of a split's files as one uint8 tensor of shape (num_bytes,)."""
    text = b"\n".join(path.read_bytes() for path in source_files(split))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_windows(split: str, *, num_samples: int, sequence: int, step: int) -> torch.Tensor:
    """Return int64 windows of text, shape (num_samples, sequence); the same for the same arguments.

    Random access by step needs no reader position: a resumed job asks for the next step.
    """
    text = load_split(split)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(text.numel() - sequence, (num_samples, 1), generator=generator)
    return text[starts + torch.arange(sequence)].long()
