"""Compares published configurations with the planner's own choice for the same job."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outsize.cost.layout import Job
from outsize.planner.evaluate import Evaluator
from outsize.planner.validation import Prediction
from outsize.strategies.base import ALL_LAYOUTS, Space
from outsize.strategies.registry import ALL_STRATEGIES

__all__ = ["choice_ratios"]


def choice_ratios(predictions: Sequence[Prediction], space: Space = ALL_LAYOUTS) -> list[float]:
    """Return, for runs predicted to fit, the planner's own step time ÷ the published layout's.

    Both are predicted; at most 1 where the published layout lies in the planner's space. Runs of the same
    job are planned once; runs predicted not to fit their devices are left out.
    """
    best_s: dict[tuple[object, ...], float] = {}
    ratios = []
    for prediction in predictions:
        job = prediction.run.job
        if not prediction.fits:
            continue
        key = (_job_key(job), space)
        if key not in best_s:
            best_s[key] = _best_step_s(job, space)
        ratios.append(best_s[key] / prediction.estimate.step_time_s)
    return ratios


def _job_key(job: Job) -> tuple[object, ...]:
    profile = job.profile
    model = (profile.name, profile.num_parameters, profile.tokens_per_sample)
    memory = job.cluster.weakest_device().memory_bytes
    return (
        *model,
        job.cluster.argument,
        memory,
        job.cluster.network,
        job.global_batch,
        job.precision,
        job.software,
    )


def _best_step_s(job: Job, space: Space) -> float:
    evaluator = Evaluator(job, space.allows_recompute)
    layouts = (
        layout
        for strategy in ALL_STRATEGIES
        if strategy.name != "parameter_server" and strategy.refusal(job) is None
        for layout in strategy.layouts(job, space)
    )
    best = evaluator.search(layouts).best
    return best.estimate.step_time_s if best else math.inf
