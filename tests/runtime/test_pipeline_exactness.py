"""Every schedule trains as one process does, in a design where every pair of settings occurs together.

Each case is one plan: five AdamW steps and an evaluation, whose losses, norms, gradients and parameters are
those of one process that takes the global batch whole. Cases of one world size share their processes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import nn

from helpers.models import reference_model
from helpers.processes import run_distributed
from helpers.tiny_language_model import (
    NUM_BLOCKS,
    TinyLanguageModel,
    stage_labels,
    tied_model,
    token_batch,
    untied_model,
)
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.plan.schedules import SCHEDULE_NAMES, legal_microbatch_counts, make_schedule
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

NUM_STEPS = 5
FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": SCHEDULE_NAMES,
    "mesh": (Mesh(), Mesh(pp=2), Mesh(pp=4)),
    "is_tied": (True, False),
    "accumulation": (1, 2, 3),
    "labels": ("ragged", "all"),
    "batch": ("full", "uneven", "short"),
    "max_norm": (None, 0.05),
    "recompute": ("none", "all", "some"),
}


@dataclass(frozen=True)
class Case:
    """One value of each factor."""

    schedule: str
    mesh: Mesh
    is_tied: bool
    accumulation: int
    labels: str
    batch: str
    max_norm: float | None
    recompute: str

    @property
    def pairs(self) -> frozenset[tuple[tuple[str, Any], ...]]:
        return frozenset(combinations(((name, getattr(self, name)) for name in FACTORS), 2))

    @property
    def num_microbatches(self) -> int:
        """More than ranks where the schedule allows it: the pipeline fills and a micro-batch is over."""
        ranks = self.mesh.pp
        return legal_microbatch_counts(self.schedule, num_ranks=ranks, near=ranks + 1)[-1]

    @property
    def num_passes(self) -> int:
        """Micro-batches in a step over all ranks, which is what the case costs."""
        return self.mesh.world_size * self.accumulation * self.num_microbatches

    @property
    def plan(self) -> Plan:
        schedule = make_schedule(
            self.schedule, num_ranks=self.mesh.pp, num_microbatches=self.num_microbatches
        )
        virtual = schedule.num_stages // self.mesh.pp
        return Plan(
            "pipeline_parallel",
            self.mesh,
            tuple(_stages(schedule.num_stages, self.recompute)),
            ScheduleSpec(self.schedule, self.num_microbatches, virtual),
            2 * self.mesh.dp * self.accumulation * self.num_microbatches,
            optimizer=OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_gradient_norm=self.max_norm),
            gradient_accumulation_steps=self.accumulation,
        )

    @property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Two samples a micro-batch; uneven: some have one; short: fewer samples than micro-batches."""
        full = self.plan.global_batch
        last = {"full": full, "uneven": full - 1, "short": self.num_microbatches - 1}[self.batch]
        sizes = [full, full, last, full, last]
        return [token_batch(size, seed=step, labels=self.labels) for step, size in enumerate(sizes)]


def _stages(num_stages: int, recompute: str) -> Iterator[StageSpec]:
    step = {"none": 0, "all": 1, "some": 2}[recompute]
    blocks = [f"blocks.{index}" for index in range(NUM_BLOCKS)]
    for index, label in enumerate(stage_labels(num_stages)):
        own = blocks[index * NUM_BLOCKS // num_stages : (index + 1) * NUM_BLOCKS // num_stages]
        yield StageSpec(index, label, recompute=tuple(own[::step]) if step else ())


@cache
def covering_cases() -> list[Case]:
    """Every schedule on every mesh, with the other factors such that all pairs of values occur.

    Greedy: each case takes, of all values of the other factors, those with most pairs still to be seen, and
    of these the cheapest. Large meshes choose first; the pairs missing in the end are left to small ones.
    """
    fixed = list(product(FACTORS["schedule"], reversed(FACTORS["mesh"])))
    others = list(product(*list(FACTORS.values())[2:]))
    seen: set[Any] = set()
    cases: list[Case] = []
    for schedule, mesh in [*fixed, *sorted(fixed, key=lambda pair: pair[1].world_size)]:
        case = max(
            (Case(schedule, mesh, *values) for values in others),
            key=lambda case: (len(case.pairs - seen), -case.num_passes),
        )
        if len(cases) < len(fixed) or case.pairs - seen:
            cases.append(case)
            seen |= case.pairs
    return cases


WITH_REPLICAS = (
    Case("1f1b", Mesh(pp=2, dp=2), True, 2, "ragged", "uneven", 0.05, "some"),
    Case("interleaved_zero_bubble", Mesh(pp=2, dp=2), False, 1, "all", "short", None, "all"),
    Case("zb_v", Mesh(pp=2, dp=2), True, 3, "ragged", "short", 0.05, "none"),
)


def test_every_pair_of_settings_occurs() -> None:
    """All values of any two of the eight factors stand together in at least one case."""
    seen = {pair for case in covering_cases() for pair in case.pairs}
    wanted = {
        ((first, one), (second, other))
        for first, second in combinations(FACTORS, 2)
        for one, other in product(FACTORS[first], FACTORS[second])
    }
    assert wanted <= seen


@dataclass
class Trained:
    """What five steps gave: losses, norms, gradients as the optimizer saw them, and the last parameters.

    ``evaluation`` is the loss of the last batch in evaluation mode, after the steps.
    """

    losses: list[float]
    norms: list[float]
    evaluation: float
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]


def train_case(case: Case) -> Trained:
    """Return what this process holds after training under the case's plan."""
    batches = case.batches
    model = parallelize(tied_model if case.is_tied else untied_model, case.plan, sample_batch=batches[0])
    gradients: list[dict[str, torch.Tensor]] = []

    def keep_gradients(*_: Any) -> None:
        gradients.append({n: p.grad.clone() for n, p in model.parameters.items() if p.grad is not None})

    model.optimizer.register_step_pre_hook(keep_gradients)
    steps = [model.train_step(batch) for batch in batches]
    parameters = {name: p.detach().clone() for name, p in model.parameters.items()}
    losses, norms = [step.loss for step in steps], [step.gradient_norm for step in steps]
    return Trained(losses, norms, model.evaluate(batches[-1]), gradients, parameters)


def train_cases(_rank: int, cases: list[Case]) -> list[Trained]:
    gc.freeze()  # each case collects garbage: not among all that is imported
    return [train_case(case) for case in cases]


def train_whole(case: Case) -> Trained:
    """Train the whole model on whole batches with nothing but torch."""
    model = reference_model(lambda: TinyLanguageModel(is_tied=case.is_tied))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    limit = float("inf") if case.max_norm is None else case.max_norm
    trained = Trained([], [], 0.0, [], {})
    for batch in case.batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        trained.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        trained.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        trained.losses.append(loss.item())
    trained.evaluation = model(**case.batches[-1])["loss"].item()
    trained.parameters = {name: p.detach() for name, p in model.named_parameters()}
    return trained


def assert_trained_alike(case: Case, expected: Trained, by_rank: list[Trained]) -> None:
    for trained in by_rank:
        assert trained.losses == by_rank[0].losses, f"{case}: every rank knows the same loss"
        assert trained.losses == pytest.approx(expected.losses, rel=1e-10), case
        assert trained.evaluation == by_rank[0].evaluation == pytest.approx(expected.evaluation, rel=1e-10), (
            case
        )
        assert trained.norms == pytest.approx(expected.norms, rel=1e-10), case
        for gradients, wanted in zip(trained.gradients, expected.gradients, strict=True):
            _assert_close(case, gradients, wanted)
        _assert_close(case, trained.parameters, expected.parameters)
    assert {name for trained in by_rank for name in trained.parameters} == set(expected.parameters), case
    assert {name for trained in by_rank for name in trained.gradients[0]} == set(expected.parameters), case


def _assert_close(case: Case, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, wanted[name], rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{case} {n}: {text}"
        )


def test_every_schedule_on_one_process_trains_exactly() -> None:
    """Several virtual stages, also V-shaped, run on one process that needs no process group."""
    cases = [case for case in covering_cases() if case.mesh.world_size == 1]
    try:
        results = train_cases(0, cases)
    finally:
        gc.unfreeze()
    for case, trained in zip(cases, results, strict=True):
        assert_trained_alike(case, train_whole(case), [trained])


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_schedule_on_several_processes_trains_exactly(world_size: int) -> None:
    """B33, B35, B40, B41, B51, B52, B53, B61, B63, B147, B167, B173: accumulation, ragged and empty
    micro-batches, V shapes with replicas, one norm, one loss on every rank."""
    cases = [case for case in (*covering_cases(), *WITH_REPLICAS) if case.mesh.world_size == world_size]
    results = run_distributed(train_cases, world_size, cases, timeout_s=110)
    for case, *by_rank in zip(cases, *results, strict=True):
        assert_trained_alike(case, train_whole(case), by_rank)
