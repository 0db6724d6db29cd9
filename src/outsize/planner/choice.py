"""Compares published configurations with the planner's own choice for the same job."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from outsize.cost.layout import Job, Layout
from outsize.planner.evaluate import Evaluator
from outsize.planner.validation import Prediction
from outsize.strategies.base import ALL_LAYOUTS, Space
from outsize.strategies.registry import ALL_STRATEGIES

__all__ = ["PUBLISHED_LAYOUTS", "choice_ratios"]

# What was published besides what has a name here: ZB-2p, a schedule searched in twice 1F1B's memory.
PUBLISHED_LAYOUTS = replace(ALL_LAYOUTS, schedules=(*ALL_LAYOUTS.schedules, "zb_2p"))

_SLACK = 1 + 1e-9  # rounding
_PATIENCE = 10  # a choice a few per cent from the best will do


def choice_ratios(
    predictions: Sequence[Prediction], space: Space = PUBLISHED_LAYOUTS, *, num_workers: int | None = None
) -> Iterator[float]:
    """Yield, for each run predicted to fit, the published layout's step time ÷ the planner's own.

    Both are predicted; at least 1 where the published layout lies in the planner's space. Runs predicted not
    to fit their devices are left out. Runs of one job are planned once. ``num_workers`` processes (default:
    one a core) plan at the same time.
    """
    fitting = [prediction for prediction in predictions if prediction.fits]
    jobs: dict[tuple[object, ...], tuple[Job, float]] = {}
    keys = []
    for prediction in fitting:
        job = _job_as_run(prediction)
        key = _job_key(job)
        published_s = prediction.estimate.step_time_s
        known_s = jobs[key][1] if key in jobs else math.inf
        jobs[key] = (job, min(published_s, known_s))
        keys.append(key)
    spaces = [space] * len(jobs)
    workers = min(num_workers or os.cpu_count() or 1, max(len(jobs), 1))
    if workers == 1:
        planned = map(_best_step_s, *zip(*jobs.values(), strict=True), spaces) if jobs else iter(())
        yield from _ratios(fitting, keys, dict(zip(jobs, planned, strict=True)))
        return
    with ProcessPoolExecutor(workers) as pool:
        futures = {
            key: pool.submit(_best_step_s, job, published_s, space)
            for key, (job, published_s) in jobs.items()
        }
        for prediction, key in zip(fitting, keys, strict=True):
            yield prediction.estimate.step_time_s / futures[key].result()


def _ratios(
    fitting: Sequence[Prediction], keys: Sequence[tuple[object, ...]], best_s: dict[tuple[object, ...], float]
) -> Iterator[float]:
    for prediction, key in zip(fitting, keys, strict=True):
        yield prediction.estimate.step_time_s / best_s[key]


def _job_as_run(prediction: Prediction) -> Job:
    """The job with the batch that was run, where the published one does not divide."""
    layout: Layout = prediction.run.layout
    batch = layout.num_replicas * layout.microbatch_size * layout.num_microbatches
    return replace(prediction.run.job, global_batch=batch)


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


def _best_step_s(job: Job, published_s: float, space: Space) -> float:
    """Seconds of the planner's own choice; slower ones than was published are looked at only if need be."""
    space = replace(space, num_devices=job.cluster.num_devices)
    layouts = [
        layout
        for strategy in ALL_STRATEGIES
        if strategy.name != "parameter_server" and strategy.refusal(job) is None
        for layout in strategy.layouts(job, space)
    ]
    evaluator = Evaluator(job, space.allows_recompute, patience=_PATIENCE)
    best = evaluator.search(layouts, cutoff_s=published_s * _SLACK).best
    best = best or evaluator.search(layouts).best
    return best.estimate.step_time_s if best else math.inf
