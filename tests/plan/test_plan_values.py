"""Values that no plan can have are refused by name, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outsize.errors import PlanError
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.runnable import check_runnable

PLAN = Plan("pipeline_parallel", Mesh(), (StageSpec(0, ""),), ScheduleSpec(), global_batch=4)


def _with(name: str, value: Any) -> Plan:
    part, _, field = name.rpartition(".")
    if not part:
        return replace(PLAN, **{field: value})
    return replace(PLAN, **{part: replace(getattr(PLAN, part), **{field: value})})


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize(
    "name",
    [
        "schedule.num_microbatches",
        "schedule.num_virtual_stages",
        "gradient_accumulation_steps",
        "global_batch",
        "mesh.dp",
    ],
)
def test_a_count_is_a_whole_number_of_one_or_more(name: str, value: object) -> None:
    with pytest.raises(PlanError, match=f"{name} is {value!r}") as caught:
        check_runnable(_with(name, value))
    assert "whole number" in caught.value.why
    assert name in caught.value.attempt


@pytest.mark.parametrize("value", ["1e-3", -1e-3, float("nan"), float("inf"), True])
def test_a_learning_rate_is_a_finite_number_not_below_zero(value: object) -> None:
    with pytest.raises(PlanError, match=r"optimizer\.learning_rate is"):
        check_runnable(_with("optimizer.learning_rate", value))


@pytest.mark.parametrize("value", [0, -1.0, "1", float("nan")])
def test_a_gradient_norm_is_above_zero(value: object) -> None:
    with pytest.raises(PlanError, match=r"optimizer\.max_gradient_norm is"):
        check_runnable(_with("optimizer.max_gradient_norm", value))


def test_values_at_the_edge_are_accepted() -> None:
    check_runnable(replace(PLAN, optimizer=OptimizerSpec(learning_rate=0, max_gradient_norm=float("inf"))))
    check_runnable(PLAN)
