"""What a framework adds to the physics: one time factor, what it overlaps, and what state it keeps."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median

__all__ = ["Software", "find_software", "usual_factor"]


@dataclass(frozen=True, slots=True)
class Software:
    """A framework. ``factor`` multiplies every time; ``overlap`` is the share of a backward that reducing
    gradients can hide under; ``gradient_bytes`` replaces the precision's bytes of a gradient where the
    framework accumulates in float32.
    """

    name: str = "outsize"
    factor: float = 1.0
    overlap: float = 0.8
    gradient_bytes: float | None = None
    parameter_bytes: float | None = None
    fused_attention: bool = True
    dropout: bool = False
    ties_embeddings: bool = True  # of GPT models
    kept_mlp_copies: int = 0  # of an MLP's width, kept for backward; 0: as few as fused kernels need
    kept_norm_bytes: int = 2  # a norm keeps of each value of its input
    hides_tensor_parallel: bool = False  # backward's collectives run beside the weights' gradients
    fuses_gradients: bool = False  # products add weights' gradients to the accumulated ones themselves
    ends_together: bool = True  # all ranks wait for each other before the optimizer, as for one norm
    scatters_sends: bool = False  # each device of a tensor-parallel group sends its part to the next stage
    keeps_outputs: bool = False  # a stage's outputs stay until their gradient is back
    bucket_bytes: float = 0.0  # fixed communication buffers


@cache
def _tables() -> dict[str, Software]:
    text = files("outsize.cost").joinpath("software.toml").read_text(encoding="utf-8")
    return {name: Software(name=name, **figures) for name, figures in tomllib.loads(text).items()}


def find_software(name: str) -> Software:
    """Return the framework called ``name``; one that is not known is as slow as known ones usually are."""
    tables = _tables()
    return tables[name] if name in tables else Software(name=name, factor=usual_factor())


def usual_factor() -> float:
    """The median factor of the known frameworks."""
    return median(software.factor for software in _tables().values())
