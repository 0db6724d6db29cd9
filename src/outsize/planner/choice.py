"""Compares published configurations with the planner's own choice for the same job."""

from __future__ import annotations

from outsize.cost.layout import Job
from outsize.planner.evaluate import Evaluator
from outsize.planner.validation import Prediction
from outsize.strategies.base import ALL_LAYOUTS, Space
from outsize.strategies.registry import ALL_STRATEGIES

__all__ = ["choice_ratio"]


def choice_ratio(prediction: Prediction, space: Space = ALL_LAYOUTS) -> float | None:
    """Return predicted step time of the planner's choice ÷ that of the published configuration.

    At most 1 where the published configuration lies in the planner's space; None where the published
    configuration is predicted not to fit, or nothing fits.
    """
    job: Job = prediction.run.job
    if not prediction.fits:
        return None
    evaluator = Evaluator(job, space.allows_recompute)
    layouts = (
        layout
        for strategy in ALL_STRATEGIES
        if strategy.name != "parameter_server"
        if strategy.refusal(job) is None
        for layout in strategy.layouts(job, space)
    )
    best = evaluator.search(layouts).best
    return best.estimate.step_time_s / prediction.estimate.step_time_s if best else None
