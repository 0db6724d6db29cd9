"""Every split trains exactly like one process: losses, norms, gradients, and parameters after five steps.

A Llama here; all schedules with all other settings are in `test_pipeline_exactness`, on a smaller model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.models import make_batch, tied_llama, train_reference, untied_llama
from helpers.processes import run_distributed
from helpers.shardings import split_operators
from outsize.model.operator_rules.shards import shard_of
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize
from outsize.runtime.tensor_parallel import parameter_placements

pytestmark = pytest.mark.distributed

OPTIMIZER = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1)
CUTS = {1: (), 2: ("model.layers.2",), 4: ("model.layers.1", "model.layers.2", "model.layers.3")}
NUM_STEPS = 5
GLOBAL_BATCH = 12


def make_plan(mesh: Mesh, **changes: Any) -> Plan:
    labels = ("", *CUTS[mesh.pp])
    stages = tuple(StageSpec(index, label) for index, label in enumerate(labels))
    plan = Plan("pipeline_parallel", mesh, stages, ScheduleSpec(), GLOBAL_BATCH, optimizer=OPTIMIZER)
    return replace(plan, **changes)


FULL = [(GLOBAL_BATCH, 9)] * NUM_STEPS  # samples and tokens of each batch


def batches(sizes: list[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
    return [make_batch(num, seed=step, length=length) for step, (num, length) in enumerate(sizes)]


def evaluate(_rank: int, factory: Callable[[], Any], plan: Plan) -> list[float]:
    """Return losses in evaluation mode before and after a step, on another length than that trained on."""
    model = parallelize(factory, plan, sample_batch=batches(FULL)[0])
    other = make_batch(GLOBAL_BATCH, seed=9, length=6)
    before = model.evaluate(other)
    model.train_step(batches(FULL)[0])
    return [before, model.evaluate(other)]


def train(factory: Callable[[], Any], plan: Plan, sizes: list[tuple[int, int]]) -> tuple[Any, ...]:
    """Return losses, norms, first gradients, final parameters and position on the mesh of this rank."""
    data = batches(sizes)
    model = parallelize(factory, plan, sample_batch=data[0])
    first = model.compute_gradients(data[0])
    gradients = {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}
    results = [model.train_step(batch) for batch in data]
    assert first.loss == results[0].loss
    parameters = {name: p.detach().clone() for name, p in model.parameters.items()}
    return (
        [r.loss for r in results],
        [r.gradient_norm for r in results],
        gradients,
        parameters,
        model.mesh.coordinates,
    )


def train_all(_rank: int, factory: Callable[[], Any], plans: list[Plan], sizes: Any) -> list[Any]:
    return [train(factory, plan, sizes) for plan in plans]


def assert_trains_like_one_process(
    factory: Callable[[], Any], plans: list[Plan], sizes: list[tuple[int, int]] = FULL
) -> None:
    """Train under each plan, of the same number of processes and optimizer, and compare with one process."""
    expected = train_reference(factory, batches(sizes), plans[0].optimizer)
    results = run_distributed(train_all, plans[0].mesh.world_size, factory, plans, sizes, timeout_s=110)
    for plan, *by_rank in zip(plans, *results, strict=True):
        for result in by_rank:
            assert_equal_to_reference(result, expected, plan)
        assert {name for result in by_rank for name in result[3]} == set(expected[3])
        assert len({tuple(losses) for losses, *_ in by_rank}) == 1, "every rank knows the same loss"


def assert_equal_to_reference(result: tuple[Any, ...], expected: tuple[Any, ...], plan: Plan) -> None:
    losses, norms, gradients, parameters, coordinates = result
    assert losses == pytest.approx(expected[0], rel=1e-12)
    assert norms == pytest.approx(expected[1], rel=1e-10)
    placements = parameter_placements(plan.sharding) if plan.sharding else {}

    def held(name: str, whole: torch.Tensor) -> torch.Tensor:
        if name not in placements:
            return whole
        return shard_of(whole, placements[name], plan.mesh.tp, coordinates["tp"])

    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, held(name, expected[2][name]), rtol=1e-10, atol=1e-12)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, held(name, expected[3][name]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_with_tied_embeddings_trains_exactly(pp: int) -> None:
    """1F1B with 1 to 4 micro-batches and GPipe, with ragged labels."""
    plans = [
        make_plan(Mesh(pp=pp), schedule=ScheduleSpec(schedule, num_microbatches))
        for schedule, num_microbatches in (*(("1f1b", count) for count in (1, 2, 3, 4)), ("gpipe", 3))
    ]
    assert_trains_like_one_process(tied_llama, plans)


def test_one_process_without_a_process_group_trains_exactly() -> None:
    """A plan of one process needs no torch.distributed."""
    plan = make_plan(Mesh(), schedule=ScheduleSpec("1f1b", 3))
    expected = train_reference(tied_llama, batches(FULL), plan.optimizer)
    assert_equal_to_reference(train(tied_llama, plan, FULL), expected, plan)


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(pp=4), Mesh(pp=2, dp=2)])
def test_clipping_uses_one_norm_over_all_stages_with_ties_counted_once(mesh: Mesh) -> None:
    """B20, B61: the norm is that of one process, not each stage's own, and not with the tie counted twice."""
    optimizer = replace(OPTIMIZER, max_gradient_norm=0.1)
    plan = make_plan(mesh, schedule=ScheduleSpec("1f1b", 2), optimizer=optimizer)
    assert_trains_like_one_process(tied_llama, [plan])


def test_tied_copies_stay_equal_bit_by_bit() -> None:
    """B16: the embedding on the first stage and the head on the last are one parameter after five steps."""
    plan = make_plan(Mesh(pp=2), schedule=ScheduleSpec("1f1b", 2))
    first, last = run_distributed(train_all, 2, tied_llama, [plan], FULL)
    name = "model.embed_tokens.weight"
    assert torch.equal(first[0][3][name], last[0][3][name])


@pytest.mark.parametrize(
    ("mesh", "factory"),
    [
        (Mesh(tp=2), untied_llama),
        (Mesh(tp=4), tied_llama),
        (Mesh(pp=2, tp=2), tied_llama),
        (Mesh(dp=2, tp=2), untied_llama),
    ],
)
def test_split_operators_alone_and_combined_train_exactly(mesh: Mesh, factory: Any) -> None:
    """B45, B72: split operators with pipelines, with replicas, clipping by one norm, ragged labels."""
    optimizer = replace(OPTIMIZER, max_gradient_norm=0.3)
    plan = make_plan(mesh, schedule=ScheduleSpec("1f1b", 2), optimizer=optimizer)
    assert_trains_like_one_process(factory, [split_operators(factory, plan)])


def test_batches_of_any_size_and_length_train_exactly() -> None:
    """B37, B147, B151, B153: uneven micro-batches, fewer samples than micro-batches, changing lengths."""
    sizes = [(12, 9), (10, 9), (3, 9), (12, 5), (7, 8)]
    schedule = ScheduleSpec("1f1b", 4)
    plans = [make_plan(Mesh(pp=2), schedule=schedule), make_plan(Mesh(dp=2), schedule=schedule)]
    assert_trains_like_one_process(tied_llama, plans, sizes)


def test_split_operators_take_batches_of_other_shapes() -> None:
    """A shape that comes later is recorded on the whole model again, not on what one rank holds of it."""
    plan = split_operators(tied_llama, make_plan(Mesh(tp=2), schedule=ScheduleSpec("1f1b", 2)))
    assert_trains_like_one_process(tied_llama, [plan], [(12, 9), (12, 6), (8, 9)])
    one = run_distributed(evaluate, 1, tied_llama, make_plan(Mesh()))
    two = run_distributed(evaluate, 2, tied_llama, plan)
    assert two[0] == two[1]
    assert two[0] == pytest.approx(one[0], rel=1e-12)
