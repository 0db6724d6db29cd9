"""A user's own schedule, read from a file, is what really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import train_reference
from helpers.processes import run_distributed
from helpers.tiny_language_model import stage_labels, tied_model, token_batch
from outsize.errors import PlanError
from outsize.model.deferred import build_deferred
from outsize.model.program import Program
from outsize.model.record import record_module
from outsize.plan.actions import Schedule
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.plan.schedule_files import save_schedule
from outsize.plan.schedule_memory import StageActivations
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes
from outsize.planner.schedule_problem import ScheduleProblem
from outsize.planner.schedule_synthesis import synthesise_schedule
from outsize.runtime.parallelize import parallelize
from outsize.runtime.stage_placement import place_stages

# Three stages on two ranks, micro-batches out of order, backwards split for some and whole for others.
OWN: dict[str, Any] = {
    "format_version": 1,
    "name": "mine",
    "num_microbatches": 3,
    "stage_to_rank": [0, 1, 0],
    "actions": [
        [
            "0F1",
            "0F0",
            "2F1",
            "2B1",
            "0F2",
            "2F0",
            "2I0",
            "2F2",
            "2B2",
            "0B1",
            "0I0",
            "0W0",
            "0I2",
            "0W2",
            "2W0",
        ],
        ["1F1", "1F0", "1B1", "1F2", "1I0", "1W0", "1B2"],
    ],
}
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, max_gradient_norm=0.5)
BATCHES = [token_batch(size, seed=size, labels="ragged") for size in (7, 6, 2)]


def make_plan(path: Path, num_stages: int = 3) -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(stage_labels(num_stages)))
    return Plan("pipeline_parallel", Mesh(pp=2), stages, ScheduleSpec(str(path), 3), 7, optimizer=OPTIMIZER)


def recording() -> Program:
    module = build_deferred(tied_model).module
    return record_module(module, token_batch(2, seed=0), granularity="blocks")


def train_and_watch(rank: int, plan: Plan) -> tuple[Any, ...]:
    """Return losses, norms, parameters, an evaluation, and the samples of each micro-batch as they ran."""
    model = parallelize(tied_model, plan, sample_batch=BATCHES[0])
    model.compute_gradients(BATCHES[0])  # records its shapes
    sizes: list[int] = []
    block = model._module.get_submodule(("blocks.0", "blocks.3")[rank])
    handle = block.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[0]))
    model.compute_gradients(BATCHES[0])
    handle.remove()
    steps = [model.train_step(batch) for batch in BATCHES]
    parameters = {name: p.detach().clone() for name, p in model.parameters.items()}
    losses, norms = [step.loss for step in steps], [step.gradient_norm for step in steps]
    return losses, norms, parameters, model.evaluate(BATCHES[0]), sizes


def train_all(rank: int, plans: list[Plan]) -> list[tuple[Any, ...]]:
    return [train_and_watch(rank, plan) for plan in plans]


def uneven_schedule() -> Schedule:
    """Seek a schedule for three stages on the first rank and one on the second, each with its own time."""
    stages = tuple(StageTimes.split(time_s, time_s, 0.8 * time_s) for time_s in (1.0, 4.0, 2.0, 1.5))
    problem = ScheduleProblem(
        times=ScheduleTimes(stages, (0.1, 0.1, 0.0)),
        stage_to_rank=(0, 1, 0, 0),
        num_microbatches=3,
        activations=(StageActivations(10, 7),) * 4,
        memory_limit_bytes=(60, 30),
    )
    return synthesise_schedule(problem).schedule


@pytest.mark.distributed
def test_schedules_from_files_run_in_their_own_order_and_exactly(tmp_path: Path) -> None:
    """Losses, norms, parameters and an evaluation; each micro-batch's samples at their place in the list.

    One schedule is the user's, one sought for unequal stages; their ranks have different numbers of stages.
    """
    own, sought = tmp_path / "mine.json", tmp_path / "sought.json"
    own.write_text(json.dumps(OWN))
    save_schedule(uneven_schedule(), sought)
    losses, norms, _, parameters = train_reference(tied_model, BATCHES, OPTIMIZER)
    results = run_distributed(train_all, 2, [make_plan(own), make_plan(sought, num_stages=4)])
    assert all(by_plan[0][-1] == [2, 3, 2] for by_plan in results), "the samples of 1, 0, 2"
    for by_plan in results:
        for (found_losses, found_norms, held, evaluation, _), first in zip(by_plan, results[0], strict=True):
            assert found_losses == pytest.approx(losses, rel=1e-10)
            assert found_norms == pytest.approx(norms, rel=1e-10)
            assert evaluation == first[3]
            for name, parameter in held.items():
                torch.testing.assert_close(parameter, parameters[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([OWN["actions"][0], ["1B1", *OWN["actions"][1][:2], *OWN["actions"][1][3:]]], "1B1 can never run"),
        ([OWN["actions"][0], OWN["actions"][1][:-1]], "stage 1 has no backward"),
        ([[*OWN["actions"][0], "1F0"], OWN["actions"][1]], "rank 1 holds stage 1"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_before_anything_starts(
    tmp_path: Path, actions: list[list[str]], message: str
) -> None:
    """A circle of waits, a missing action, an action on the wrong rank: each is told by its place."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**OWN, "actions": actions}))
    with pytest.raises(PlanError, match=message):
        place_stages(make_plan(path), recording(), 0)


def test_a_plan_with_another_number_of_stages_is_refused(tmp_path: Path) -> None:
    """The file has three stages; a plan that cuts the model in two hears so."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN))
    with pytest.raises(
        PlanError, match=r"has 2 stages, and its schedule 3[\s\S]*on ranks 0, 1, 0[\s\S]*3 entries"
    ):
        place_stages(make_plan(path, num_stages=2), recording(), 0)
