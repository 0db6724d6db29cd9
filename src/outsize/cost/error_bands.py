"""How far a prediction may be off, by how the model was recorded: the rung of the fallback ladder.

Where a model is recorded on fake tensors, or described by formulas, the bands hold nine of ten published runs
(`outsize validate`, docs/experiments.md). On real tensors sizes inside blocks are those of one sample batch;
the bands are twice as wide. With parameter counts alone activations and FLOPs are guesses, and the bands hold
what nine Hugging Face models had against the guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.plan.plan import Plan

__all__ = ["ErrorBands", "describe_plan_rung", "describe_rung", "error_bands"]


@dataclass(frozen=True, slots=True)
class ErrorBands:
    """Factors between which measured ÷ predicted is expected to lie, lowest and highest."""

    memory: tuple[float, float]
    step_time: tuple[float, float]


_MEASURED = ErrorBands(memory=(0.93, 1.07), step_time=(0.83, 1.17))
_BANDS = {
    "formulas": _MEASURED,
    "fake_tensors": _MEASURED,
    "real_tensors": ErrorBands(memory=(0.86, 1.14), step_time=(0.66, 1.34)),
    "parameter_counts": ErrorBands(memory=(0.3, 8.0), step_time=(0.9, 200.0)),
}
_SOURCES = {
    "formulas": "formulas of a preset",
    "fake_tensors": "a recording on fake tensors",
    "real_tensors": "a recording on real tensors",
    "parameter_counts": "parameter counts alone",
}


def error_bands(rung: str) -> ErrorBands:
    """Return the bands of predictions for a model recorded on ``rung``."""
    return _BANDS[rung]


def describe_rung(rung: str, reason: str = "", *, is_emulated: bool = False) -> str:
    """Return a sentence on where predictions come from and how far they may be off.

    ``reason`` says why no better rung was reached. Emulated devices share the cores of one machine: their
    tensors are predicted as well, their speed is not (a factor of 1.4 to 5 was measured).
    """
    bands = error_bands(rung)
    because = f" ({reason})" if reason else ""
    time = "up to 5 times the time on emulated devices"
    if not is_emulated:
        time = f"{_range(bands.step_time)} times the time"
    return (
        f"predicted from {_SOURCES[rung]}{because}: expect {_range(bands.memory)} times the memory and {time}"
    )


def describe_plan_rung(plan: Plan) -> str:
    """Return :func:`describe_rung` of a plan."""
    is_emulated = plan.device_memory_bytes is not None
    return describe_rung(plan.rung, plan.rung_reason, is_emulated=is_emulated)


def _range(band: tuple[float, float]) -> str:
    return f"{band[0]:g} to {band[1]:g}"
