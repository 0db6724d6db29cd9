"""Numbers in a plan that no job can have: plans are also written in Python and edited by hand."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from numbers import Integral, Real
from typing import TypeGuard

from outsize.errors import PlanError
from outsize.plan.plan import Plan

__all__ = ["check_plan_values", "with_denominator"]

DENOMINATORS = ("samples", "replicas")


def check_plan_values(plan: Plan) -> None:
    """Refuse counts that are not whole numbers of one or more, and optimizer settings out of range.

    Raises:
        PlanError: with the field, its value and what it may be.
    """
    counts: dict[str, object] = {
        "schedule.num_microbatches": plan.schedule.num_microbatches,
        "schedule.num_virtual_stages": plan.schedule.num_virtual_stages,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "global_batch": plan.global_batch,
        **{f"mesh.{axis}": degree for axis, degree in plan.mesh.degrees.items()},
    }
    for name, value in counts.items():
        # True and 2.0 compare equal to whole numbers, and fail later where they are used as counts
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise _refusal(name, value, "a whole number of 1 or more")
    if plan.denominator not in DENOMINATORS:
        raise _refusal("denominator", plan.denominator, " or ".join(DENOMINATORS))
    rate: object = plan.optimizer.learning_rate
    if not _is_number(rate) or not isfinite(rate) or rate < 0:
        raise _refusal("optimizer.learning_rate", rate, "a finite number of 0 or more")
    norm: object = plan.optimizer.max_gradient_norm
    if norm is not None and not (_is_number(norm) and norm > 0):
        raise _refusal("optimizer.max_gradient_norm", norm, "a number above 0, or None for no clipping")


def with_denominator(plan: Plan, denominator: str) -> Plan:
    """Return the plan with another denominator of losses.

    Raises:
        PlanError: there is no such denominator.
    """
    if denominator not in DENOMINATORS:
        raise _refusal("denominator", denominator, " or ".join(DENOMINATORS))
    return replace(plan, denominator="samples" if denominator == "samples" else "replicas")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _refusal(name: str, value: object, allowed: str) -> PlanError:
    return PlanError(
        f"The plan's {name} is {value!r}.",
        why=f"It must be {allowed}.",
        attempt=f"setting {name} to {allowed}.",
    )
