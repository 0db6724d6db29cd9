"""The stable machine-readable forms that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outsize.cost.error_bands import error_bands
from outsize.plan.plan import Plan, Verdict

__all__ = ["planning_form", "verdict_form"]

_VERDICT_FIELDS = (
    "name",
    "fits",
    "needed_bytes",
    "available_bytes",
    "by_category",
    "reason_code",
    "reason",
    "right_when",
    "smallest_change",
    "step_time_s",
    "tokens_per_s",
)


def verdict_form(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict's fields and the degrees of its mesh (None where no mesh is legal)."""
    fields = {name: getattr(verdict, name) for name in _VERDICT_FIELDS}
    fields["reason_code"] = str(verdict.reason_code)
    return {**fields, "mesh": verdict.mesh.degrees if verdict.mesh else None}


def planning_form(
    verdicts: Sequence[Verdict],
    best: Plan | None = None,
    *,
    optimality_gap: float | None = None,
    search_time_s: float | None = None,
) -> dict[str, Any]:
    """Return what ``outsize plan --json`` prints; ``best`` is None where nothing fits."""
    return {
        "strategies": [verdict_form(verdict) for verdict in verdicts],
        "best": _plan_form(best) if best else None,
        "optimality_gap": optimality_gap,
        "search_time_s": search_time_s,
    }


def _plan_form(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction
    return {
        "strategy": plan.strategy,
        "mesh": plan.mesh.degrees,
        "num_microbatches": plan.schedule.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule.name,
        "num_virtual_stages": plan.schedule.num_virtual_stages,
        "state_sharding": plan.state_sharding,
        "sequence_parallel": plan.sequence_parallel,
        "step_time_s": prediction.step_time_s if prediction else None,
        "tokens_per_s": prediction.tokens_per_s if prediction else None,
        "time_by_part_s": dict(prediction.time_by_part_s) if prediction else {},
        "peak_memory_bytes": prediction.peak_memory_bytes if prediction else None,
        "stages": [asdict(stage) for stage in plan.stages],
        "rung": plan.rung,
        "rung_reason": plan.rung_reason,
        "error_bands": asdict(error_bands(plan.rung)),
    }
