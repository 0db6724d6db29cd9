"""Times of single actions, without a pipeline or within a step, and the bound a schedule has with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import _PipelineStageBase

from outsize.model.split_backward import full_backward, input_gradients
from outsize.model.stage_module import StageModule
from outsize.plan.actions import Schedule
from outsize.plan.schedule_dependencies import needed_results, produced_results, runnable_order
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate

__all__ = ["ActionLog", "bound_of_step_s", "measure_bound_s", "recording_actions"]

ActionLog = dict[tuple[int, str, int], tuple[float, float]]  # stage, kind, micro-batch -> start, end


def measure_bound_s(schedule: Schedule, stage: StageModule, microbatch: Mapping[str, torch.Tensor]) -> float:
    """Return the shortest step of a schedule, from the times of this rank's and the other ranks' actions.

    All ranks measure at the same time, each its own stage; transfers take no time.
    """
    dist.barrier()
    forward_s, backward_s = _measure_whole(stage, microbatch)
    again_s, input_s, weight_s = _measure_in_parts(stage, microbatch)
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, ((forward_s + again_s) / 2, input_s, weight_s, backward_s))
    stages = tuple(StageTimes(*each) for each in times)
    return simulate(schedule, ScheduleTimes(stages, (0.0,) * (len(stages) - 1))).makespan_s


def _measure_whole(stage: StageModule, microbatch: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    start = time.perf_counter()
    outputs, gradients = _forward(stage, microbatch)
    middle = time.perf_counter()
    full_backward(outputs, gradients)
    return middle - start, time.perf_counter() - middle


def _measure_in_parts(
    stage: StageModule, microbatch: Mapping[str, torch.Tensor]
) -> tuple[float, float, float]:
    start = time.perf_counter()
    outputs, gradients = _forward(stage, microbatch)
    forwarded = time.perf_counter()
    later = input_gradients(outputs, gradients)
    backwarded = time.perf_counter()
    later.add()
    return forwarded - start, backwarded - forwarded, time.perf_counter() - backwarded


def _forward(
    stage: StageModule, microbatch: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run a stage on what it would receive; return its outputs and gradients for them."""
    specs = [stage.program.specs[value] for value in stage.part.received]
    received = [torch.ones(spec.shape, requires_grad=spec.requires_grad) for spec in specs]
    output = stage(*received, **microbatch)
    outputs = list(output) if isinstance(output, tuple) else [output]
    return outputs, [torch.ones_like(each) for each in outputs]


@contextmanager
def recording_actions(stages: Sequence[_PipelineStageBase]) -> Iterator[ActionLog]:
    """Write down when the actions of torch's pipeline stages start and end while inside."""
    log: ActionLog = {}
    methods = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}

    def timed(stage: _PipelineStageBase, run: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run_timed(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = run(microbatch, *args, **kwargs)
            known = "I" if kind == "B" and not kwargs.get("full_backward", True) else kind
            log[stage.stage_index, known, microbatch] = (start, time.perf_counter())
            return result

        return run_timed

    for stage in stages:
        for method, kind in methods.items():
            setattr(stage, method, timed(stage, getattr(stage, method), kind))
    try:
        yield log
    finally:
        for stage in stages:
            for method in methods:
                delattr(stage, method)  # the class's own again


def bound_of_step_s(schedule: Schedule, log: ActionLog) -> float:
    """Return how long a step would take whose actions last as logged and never wait for anything else."""
    free_s = [0.0] * schedule.num_ranks
    ready_s: dict[Any, float] = {}
    for rank, action in runnable_order(schedule):
        start, end = log[action.stage, str(action.kind), action.microbatch]
        needed = [ready_s[result] for result in needed_results(action, schedule.num_stages)]
        free_s[rank] = max([free_s[rank], *needed]) + end - start
        ready_s |= dict.fromkeys(produced_results(action), free_s[rank])
    return max(free_s)
