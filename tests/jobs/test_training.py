"""What the settings of a training job change in its plan."""

from pathlib import Path
from typing import Any

import pytest

from outsize.jobs import training
from outsize.jobs.planning import PlanRequest
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec


@pytest.mark.parametrize(("is_asked", "expected"), [(False, "per_replica"), (True, "synchronised")])
def test_synchronised_batch_norm_is_written_into_the_plan(
    is_asked: bool, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run, and the plan file that a later run resumes from, have what was asked for."""
    plan = Plan("mirrored", Mesh(dp=2), (StageSpec(0, ""),), ScheduleSpec(), 4)
    ran: list[Plan] = []

    def run(plan: Plan, *_: Any) -> list[Any]:
        ran.append(plan)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "find_plan", lambda _: plan)
    monkeypatch.setattr(training, "run_under_plan", run)
    with pytest.raises(KeyboardInterrupt):
        training.train_model(
            PlanRequest(model="m", cluster="2xcpu"),
            training.RunSettings(synchronise_batch_norm=is_asked),
            name="run",
        )
    assert [each.batch_norm for each in ran] == [expected]
