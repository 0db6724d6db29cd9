"""What the settings of a training job change in its plan."""

from pathlib import Path
from typing import Any

import pytest

from outsize.errors import PlanError
from outsize.jobs import training
from outsize.jobs.planning import PlanRequest
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec


@pytest.mark.parametrize(
    ("settings", "field", "expected"),
    [
        ({}, "batch_norm", "per_replica"),
        ({"synchronise_batch_norm": True}, "batch_norm", "synchronised"),
        ({}, "denominator", "samples"),
        ({"denominator": "replicas"}, "denominator", "replicas"),
    ],
)
def test_settings_are_written_into_the_plan(
    settings: dict[str, Any], field: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run, and the plan file that a later run resumes from, have what was asked for."""
    ran: list[Plan] = []
    _record_plans(ran, monkeypatch, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        training.train_model(
            PlanRequest(model="m", cluster="2xcpu"), training.RunSettings(**settings), name="run"
        )
    assert [getattr(each, field) for each in ran] == [expected]


def test_an_unknown_denominator_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The words there are, before a process starts."""
    ran: list[Plan] = []
    _record_plans(ran, monkeypatch, tmp_path)
    with pytest.raises(PlanError, match="samples or replicas"):
        training.train_model(
            PlanRequest(model="m", cluster="2xcpu"), training.RunSettings(denominator="batch"), name="run"
        )
    assert ran == []


def _record_plans(ran: list[Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a run end where it would start its processes."""
    plan = Plan("mirrored", Mesh(dp=2), (StageSpec(0, ""),), ScheduleSpec(), 4)

    def run(plan: Plan, *_: Any) -> list[Any]:
        ran.append(plan)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "find_plan", lambda _: plan)
    monkeypatch.setattr(training, "run_under_plan", run)
