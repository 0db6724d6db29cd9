"""Failures that other systems had with losses, micro-batches and pipelines; each test names its row.

All that needs two processes runs in one pair of them: ``two_processes`` returns what each scenario gave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from helpers.models import reference_model
from helpers.processes import run_distributed
from helpers.tiny_language_model import stage_labels, tied_model, token_batch, untied_model
from outsize.errors import OutsizeError
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.plan.schedules import SCHEDULE_NAMES, legal_microbatch_counts, make_schedule
from outsize.runtime.parallel_model import ParallelModel
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

SGD = OptimizerSpec("sgd", learning_rate=0.2)


def make_plan(
    labels: tuple[str, ...],
    schedule: ScheduleSpec,
    *,
    global_batch: int = 8,
    pp: int = 2,
    dp: int = 1,
    accumulation: int = 1,
) -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(labels))
    return Plan(
        "pipeline_parallel",
        Mesh(pp=pp, dp=dp),
        stages,
        schedule,
        global_batch,
        optimizer=SGD,
        gradient_accumulation_steps=accumulation,
    )


def gradients_of(model: ParallelModel, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients this process holds."""
    loss = model.compute_gradients(batch).loss
    return loss, {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}


class Ones(nn.Module):
    """Two linear layers of ones and the mean of their output; the gradient of each weight is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            points = layer(points)
        return points.mean()


def weights_after_a_step(plan: Plan) -> list[float]:
    batch = {"points": torch.ones(8, 1)}
    model = parallelize(Ones, plan, sample_batch=batch)
    model.train_step(batch)
    return [parameter.item() for parameter in model.parameters.values()]


class OwnLoss(nn.Module):
    """A classifier with a loss of its own over the labels that count (not -100)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 6), nn.Linear(6, 5), kind
        self.double()

    def forward(self, points: torch.Tensor, labels: torch.Tensor, num_items: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(points))
        losses = nn.functional.cross_entropy(self.second(hidden), labels.clamp(min=0), reduction="none")
        counts = labels != -100
        if self.kind == "masked mean":
            return (losses * counts).sum() / counts.sum()
        if self.kind == "sum by a given number":
            return (losses * counts).sum() / num_items
        if self.kind == "mean of samples":
            return losses.mean()
        auxiliary = hidden.square().mean()  # made on the first stage, added on the last
        return (losses * counts).sum() / counts.sum().clamp(min=1) + 0.3 * auxiliary


OWN_LOSSES = ("masked mean", "sum by a given number", "mean of samples", "with an auxiliary loss")


def classes() -> dict[str, torch.Tensor]:
    """Eight samples; of the last two, a micro-batch of its own where there are four, no label counts."""
    points = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([0, -100, 1, 2, 3, 4, -100, -100])
    return {"points": points, "labels": labels, "num_items": (labels != -100).sum()}


def own_loss(kind: str, num_microbatches: int, pp: int) -> tuple[float, dict[str, torch.Tensor]]:
    plan = make_plan(("", "second")[:pp], ScheduleSpec("1f1b", num_microbatches), pp=pp)
    return gradients_of(parallelize(partial(OwnLoss, kind), plan, sample_batch=classes()), classes())


class Matching(nn.Module):
    """Inputs and labels carry the number of their sample; the loss is how far they are apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.double()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.second(self.first(inputs))
        return {"loss": (hidden * 0 + inputs - labels).abs().sum(), "labels": labels}


def distances_of_samples() -> list[float]:
    """Ten steps over an epoch's end, with batches of several sizes."""
    plan = make_plan(("", "second"), ScheduleSpec("1f1b", 4))
    numbers = torch.arange(20, dtype=torch.float64).unsqueeze(1).repeat(4, 1)
    model = parallelize(Matching, plan, sample_batch={"inputs": numbers[:8], "labels": numbers[:8]})
    chunks = [chunk.clone() for chunk in numbers.split([8, 5, 8, 3, 8, 8, 7, 8, 2, 8, 15])[:10]]
    return [model.train_step({"inputs": chunk, "labels": chunk.clone()}).loss for chunk in chunks]


def single_microbatches() -> dict[str, Any]:
    """Train and evaluate with the fewest micro-batches each schedule allows; the embedding stands alone."""
    found = {}
    for name in SCHEDULE_NAMES:
        count = legal_microbatch_counts(name, num_ranks=2, near=1)[0]
        num_stages = make_schedule(name, num_ranks=2, num_microbatches=count).num_stages
        labels = {2: ("", "blocks.0"), 4: ("", "blocks.0", "blocks.1", "blocks.7")}[num_stages]
        plan = make_plan(labels, ScheduleSpec(name, count, num_stages // 2))
        batch = token_batch(8, seed=1)
        model = parallelize(tied_model, plan, sample_batch=batch)
        found[name] = (model.train_step(batch).loss, model.evaluate(batch))
    return found


def initial_values(labels: tuple[str, ...], schedule: ScheduleSpec) -> dict[str, torch.Tensor]:
    model = parallelize(untied_model, make_plan(labels, schedule), sample_batch=token_batch(8, seed=0))
    return {name: parameter.detach().clone() for name, parameter in model.parameters.items()}


def fifty_steps() -> list[float]:
    batch = {"points": torch.ones(8, 1)}
    model = parallelize(Ones, make_plan(("", "layers.1"), ScheduleSpec("1f1b", 8)), sample_batch=batch)
    return [model.train_step(batch).loss for _ in range(50)]


def one_replica_with_a_bad_sample() -> tuple[str, bool]:
    """The last row, of the second replica, is not a number."""
    batch = {"points": torch.ones(8, 1)}
    model = parallelize(Ones, make_plan(("",), ScheduleSpec("1f1b", 2), pp=1, dp=2), sample_batch=batch)
    bad = {"points": torch.cat([torch.ones(7, 1), torch.full((1, 1), torch.nan)])}
    try:
        model.train_step(bad)
    except OutsizeError as error:
        return error.what, all(parameter.item() == 1 for parameter in model.parameters.values())
    return "", False


ILLEGAL = {
    "uneven rounds": make_plan(stage_labels(4), ScheduleSpec("interleaved_1f1b", 5, 2)),
    "uneven rounds of split backwards": make_plan(
        stage_labels(4), ScheduleSpec("interleaved_zero_bubble", 7, 2)
    ),
    "too few for dualpipe_v": make_plan(stage_labels(4), ScheduleSpec("dualpipe_v", 3, 2)),
    "three stages a rank in a V": make_plan(stage_labels(6), ScheduleSpec("zb_v", 4, 3)),
    "one stage a rank in a loop": make_plan(stage_labels(2), ScheduleSpec("looped_bfs", 4)),
    "too few stages": make_plan(stage_labels(2), ScheduleSpec("zb_v", 4, 2)),
    "unknown cut": make_plan(("", "blocks.8"), ScheduleSpec("1f1b", 4)),
    "cut that leaves a stage empty": make_plan(("", "embedding"), ScheduleSpec("1f1b", 4)),
    "cuts out of order": make_plan(
        ("", "blocks.5", "blocks.3", "blocks.6"), ScheduleSpec("looped_bfs", 4, 2)
    ),
    "unknown schedule": make_plan(stage_labels(2), ScheduleSpec("1b1f", 4)),
    "more micro-batches than samples": make_plan(stage_labels(2), ScheduleSpec("1f1b", 9)),
}


def refusals() -> dict[str, str]:
    """Return what each illegal plan is told; a legal one afterwards shows that ranks are still in step."""
    batch, told = token_batch(8, seed=0), {}
    for name, plan in ILLEGAL.items():
        try:
            parallelize(tied_model, plan, sample_batch=batch)
        except OutsizeError as error:
            told[name] = str(error)
    legal = make_plan(stage_labels(2), ScheduleSpec("1f1b", 4))
    parallelize(tied_model, legal, sample_batch=batch).train_step(batch)
    return told


SCENARIOS: dict[str, Callable[[], Any]] = {
    "ones": lambda: [
        weights_after_a_step(make_plan(("", "layers.1"), ScheduleSpec(name, 8 // steps), accumulation=steps))
        for name, steps in (("1f1b", 1), ("gpipe", 2), ("zb_h1", 4))
    ],
    **{kind: partial(own_loss, kind, 4, 2) for kind in OWN_LOSSES},
    "distances": distances_of_samples,
    "single": single_microbatches,
    "values 2": lambda: initial_values(stage_labels(2), ScheduleSpec("1f1b", 4)),
    "values 4": lambda: initial_values(stage_labels(4), ScheduleSpec("zb_v", 4, 2)),
    "fifty": fifty_steps,
    "bad sample": one_replica_with_a_bad_sample,
    "refusals": refusals,
}


def run_scenarios(_rank: int) -> dict[str, Any]:
    return {name: scenario() for name, scenario in SCENARIOS.items()}


@pytest.fixture(scope="module")
def two_processes() -> list[dict[str, Any]]:
    return run_distributed(run_scenarios, 2, timeout_s=100)


def test_a_step_on_ones_gives_four_fifths_on_every_layer(two_processes: list[dict[str, Any]]) -> None:
    """B36: learning rate 0.2 takes both weights to 0.8, whatever the stage, micro-batches or accumulation."""
    one = weights_after_a_step(make_plan(("",), ScheduleSpec("1f1b", 4), pp=1))
    for weights in (one, *two_processes[0]["ones"], *two_processes[1]["ones"]):
        assert weights == pytest.approx([0.8] * len(weights), rel=1e-6)
    assert [len(weights) for weights in two_processes[0]["ones"]] == [1, 1, 1]


@pytest.mark.parametrize("kind", OWN_LOSSES)
def test_a_users_own_loss_does_not_depend_on_micro_batches(
    kind: str, two_processes: list[dict[str, Any]]
) -> None:
    """B39, B40, B41, B43: one to eight micro-batches, one without labels, on one process and on two."""
    whole = reference_model(partial(OwnLoss, kind))
    loss = whole(**classes())
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    here = [own_loss(kind, num_microbatches, 1) for num_microbatches in (1, 2, 4, 8)]
    for found_loss, gradients in (*here, *(found[kind] for found in two_processes)):
        assert found_loss == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_evaluation_is_not_divided_by_accumulation(accumulation: int) -> None:
    """B55, B60: a batch's loss is the same figure in training, in evaluation and from the whole model."""
    batch = token_batch(8, seed=3, labels="ragged")
    plan = make_plan(("",), ScheduleSpec("1f1b", 2), pp=1, accumulation=accumulation)
    model = parallelize(tied_model, plan, sample_batch=batch)
    wanted = reference_model(tied_model)(**batch)["loss"].item()
    assert model.evaluate(batch) == pytest.approx(wanted, rel=1e-12)
    assert model.train_step(batch).loss == pytest.approx(wanted, rel=1e-12)


def test_inputs_and_labels_are_of_the_same_samples(two_processes: list[dict[str, Any]]) -> None:
    """B149: over ten steps of several sizes the number of each input is that of its label."""
    for found in two_processes:
        assert found["distances"] == [0.0] * 10


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_the_fewest_micro_batches_run_on_two_stages(name: str, two_processes: list[dict[str, Any]]) -> None:
    """B9, B148, B152: training and evaluation end, with one micro-batch wherever the schedule allows it."""
    batch = token_batch(8, seed=1)
    wanted = reference_model(tied_model)(**batch)["loss"].item()
    first, second = (found["single"][name] for found in two_processes)
    assert first == second
    assert first[0] == pytest.approx(wanted, rel=1e-12)
    assert first[1] < wanted


def test_initial_values_do_not_depend_on_the_split(two_processes: list[dict[str, Any]]) -> None:
    """B104, B105, B107: by name bit for bit those of one process; no two layers alike."""
    wanted = {name: p.detach() for name, p in reference_model(untied_model).named_parameters()}
    for split in ("values 2", "values 4"):
        held = {**two_processes[0][split], **two_processes[1][split]}
        assert held.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in held.items())
    weights = [wanted[f"blocks.{index}.up.weight"] for index in range(8)]
    assert all(not torch.equal(one, other) for one, other in pairwise(weights))


def test_fifty_steps_of_eight_micro_batches_do_not_hang(two_processes: list[dict[str, Any]]) -> None:
    """B177: every send and receive on gloo is waited for; both ranks know all losses."""
    first, second = (found["fifty"] for found in two_processes)
    assert len(first) == 50
    assert first == second


def test_a_bad_sample_in_one_replica_stops_all(two_processes: list[dict[str, Any]]) -> None:
    """B157: every rank raises the same error, none waits for another, no parameter has changed."""
    for what, is_unchanged in (found["bad sample"] for found in two_processes):
        assert "norm is nan" in what
        assert is_unchanged


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("uneven rounds", "Try: 4 or 6 micro-batches"),
        ("uneven rounds of split backwards", "Try: 6 or 8 micro-batches"),
        ("too few for dualpipe_v", "Try: 4 micro-batches"),
        ("three stages a rank in a V", "Try: 2 on each rank, that is 4 stages on 2 ranks"),
        ("one stage a rank in a loop", "Try: 2 on each rank"),
        ("too few stages", "Try: 4 entries of `stages`"),
        ("unknown cut", "begins at blocks.4, blocks.5, blocks.6 or blocks.7"),
        ("cut that leaves a stage empty", "cannot be cut at 'embedding'"),
        ("cuts out of order", "Try: blocks.3, blocks.5, blocks.6"),
        ("unknown schedule", "Try: one of gpipe, 1f1b"),
        ("more micro-batches than samples", "Try: a global batch of 9, or fewer micro-batches"),
    ],
)
def test_an_illegal_plan_is_refused_on_every_rank_before_anything_is_sent(
    name: str, words: str, two_processes: list[dict[str, Any]]
) -> None:
    """B147, B148: the same message everywhere, with the nearest legal numbers or cuts; no rank waits."""
    first, second = (found["refusals"] for found in two_processes)
    assert words in first[name]
    assert first[name] == second[name]
