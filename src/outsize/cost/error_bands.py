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
_PROCESS_SLACK = 1.2  # measured memory of a process ÷ its tensors, at most
_SHARED_CORES = 5.0  # measured time of emulated devices ÷ predicted, at most
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

    ``reason`` says why no better rung was reached. Emulated devices are processes that share the cores of one
    machine: they hold up to a fifth more than their tensors (hence a reserve) and take up to five times the
    time predicted (docs/experiments.md).
    """
    bands = error_bands(rung)
    because = f" ({reason})" if reason else ""
    memory, time, sharing = bands.memory, bands.step_time, ""
    if is_emulated:
        memory = (memory[0], round(memory[1] * _PROCESS_SLACK, 1))
        time = (time[0], max(time[1], _SHARED_CORES))
        sharing = ", as emulated devices share the cores"
    return (
        f"predicted from {_SOURCES[rung]}{because}: expect {_range(memory)} times the memory of tensors and "
        f"{_range(time)} times the time{sharing}"
    )


def describe_plan_rung(plan: Plan) -> str:
    """Return :func:`describe_rung` of a plan."""
    is_emulated = plan.device_memory_bytes is not None
    return describe_rung(plan.rung, plan.rung_reason, is_emulated=is_emulated)


def _range(band: tuple[float, float]) -> str:
    return f"{band[0]:g} to {band[1]:g}"
