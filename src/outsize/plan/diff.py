"""Two plans compared, field by field, in words."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.plan.plan import Plan
from outsize.units import format_bytes, format_seconds

__all__ = ["Difference", "compare_plans"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two plans differ: its name and both values as text."""

    name: str
    first: str
    second: str


def compare_plans(first: Plan, second: Plan) -> list[Difference]:
    """Return what differs between two plans: job, mesh, schedule, stages, and predictions."""
    rows = [(name, _described(first)[name], _described(second)[name]) for name in _described(first)]
    return [Difference(name, one, other) for name, one, other in rows if one != other]


def _described(plan: Plan) -> dict[str, str]:
    prediction, schedule = plan.prediction, plan.schedule
    fields = {
        "model": plan.model,
        "cluster": plan.cluster,
        "global batch": str(plan.global_batch),
        "precision": plan.precision,
        "optimizer": plan.optimizer.name,
        "strategy": plan.strategy,
        **{f"{axis} degree": str(degree) for axis, degree in plan.mesh.degrees.items()},
        "state sharding": plan.state_sharding,
        "schedule": schedule.name,
        "virtual stages": str(schedule.num_virtual_stages),
        "micro-batches": f"{schedule.num_microbatches} of {plan.microbatch_size}",
        "stages begin at": ", ".join(stage.begins_at or "start" for stage in plan.stages),
        "recomputed blocks": str(sum(len(stage.recompute) for stage in plan.stages)),
    }
    if prediction is not None:
        fields["step time"] = format_seconds(prediction.step_time_s)
        fields["tokens/s"] = f"{prediction.tokens_per_s:,.0f}"
        fields["peak memory"] = format_bytes(prediction.peak_memory_bytes)
        for part, time in prediction.time_by_part_s.items():
            fields[f"time: {part.replace('_', ' ')}"] = format_seconds(time)
    return fields
