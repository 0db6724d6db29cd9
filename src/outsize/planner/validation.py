"""Predicts published runs and says how far off the predictions are, by row, by source and overall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from outsize.cost.blocks import estimate_block_costs
from outsize.cost.step import StepEstimate, estimate_step
from outsize.planner.even_bounds import even_bounds
from outsize.planner.published_runs import PublishedRun, Unmodelled
from outsize.planner.stages import cut_stages

__all__ = ["Prediction", "error_summary", "predict_run"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A published run with what this model says of it; errors are (predicted ÷ measured) - 1."""

    run: PublishedRun
    estimate: StepEstimate

    @property
    def time_error(self) -> float | None:
        """Relative error of the step time."""
        measured = self.run.step_time_s
        return self.estimate.step_time_s / measured - 1 if measured else None

    @property
    def memory_bytes(self) -> float:
        """Predicted peak in the sense of the source: tensors, with the context for nvidia-smi."""
        context = self.run.job.cluster.weakest_device().reserve_bytes if self.run.counts_context else 0
        return max(sum(each.values()) - each["reserve"] for each in self.estimate.memory) + context

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory."""
        measured = self.run.memory_bytes
        return self.memory_bytes / measured - 1 if measured else None

    @property
    def fits(self) -> bool:
        """Whether the run is predicted to fit its devices."""
        return self.estimate.peak_memory_bytes <= self.run.job.cluster.weakest_device().memory_bytes


def predict_run(run: PublishedRun) -> Prediction:
    """Return the prediction for a run laid out as published, with evenly balanced layers.

    Raises:
        Unmodelled: the layers cannot be divided into as many stages.
    """
    layout = replace(run.layout, base_recompute=run.recompute)
    costs = estimate_block_costs(run.job, layout)
    bounds = even_bounds(len(run.job.profile.blocks), layout.num_chunks)
    if bounds is None:
        raise Unmodelled("fewer layers than stages")
    cuts = cut_stages(run.job, layout, costs, recompute=False, bounds=bounds)
    if cuts is None:
        raise Unmodelled("fewer layers than stages")
    return Prediction(run, estimate_step(run.job, layout, costs, cuts.assignment))


def error_summary(
    predictions: Sequence[Prediction], error: Callable[[Prediction], float | None]
) -> dict[str, Any]:
    """Return number of rows, mean and median of |error|, and the same by source."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for prediction in predictions:
        value = error(prediction)
        if value is not None:
            by_source[prediction.run.source].append(value)
    everything = [value for values in by_source.values() for value in values]
    return {
        **_statistics(everything),
        "by_source": {source: _statistics(values) for source, values in by_source.items()},
    }


def _statistics(errors: Sequence[float]) -> dict[str, Any]:
    sizes = [abs(error) for error in errors]
    return {
        "num_rows": len(sizes),
        "mean_abs_error": mean(sizes) if sizes else None,
        "median_abs_error": median(sizes) if sizes else None,
        "mean_error": mean(errors) if errors else None,
    }
