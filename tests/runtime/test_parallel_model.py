"""What a model does under a plan beside plain steps: evaluation, frozen parts, state, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.models import make_batch, reference_model, tied_llama
from helpers.processes import run_distributed
from outsize.errors import RecordingError, TrainingError
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

SGD = OptimizerSpec("sgd", learning_rate=0.1)


def make_plan(mesh: Mesh, cut: str, **changes: Any) -> Plan:
    stages = (StageSpec(0, ""), StageSpec(1, cut))[: mesh.pp]
    plan = Plan("pipeline_parallel", mesh, stages, ScheduleSpec("1f1b", 2), 8, optimizer=SGD)
    return replace(plan, **changes)


class Residual(nn.Module):
    """A block with a dropout between two layers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(torch.tanh(self.inner(hidden)))


class Chain(nn.Module):
    """Four blocks, a dropout between them, and a skip from the input to the loss."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(6, dropout) for _ in range(4))
        self.between = nn.Dropout(dropout)
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 7), persistent=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = inputs * self.frequencies
        for block in self.blocks:
            hidden = self.between(block(hidden))
        return {"loss": nn.functional.mse_loss(hidden + inputs, targets)}


def chain() -> nn.Module:
    return Chain().double()


def chain_with_dropout() -> nn.Module:
    return Chain(dropout=0.5).double()


def half_frozen_chain() -> nn.Module:
    model = chain()
    for block in list(model.blocks)[:3]:
        block.requires_grad_(False)
    model.blocks[1].inner.bias.requires_grad_(True)
    return model


def vectors(num_samples: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "targets": inputs.flip(0)}


def evaluate(_rank: int, factory: Callable[[], nn.Module], plan: Plan, batch: Any) -> tuple[float, ...]:
    """Evaluate, train one step, evaluate, train; evaluation comes first on purpose."""
    model = parallelize(factory, plan, sample_batch=batch)
    before = model.evaluate(batch)
    model.train_step(batch)
    return before, model.evaluate(batch), model.train_step(batch).loss


def train_half_frozen(_rank: int, plan: Plan, batch: Any) -> dict[str, torch.Tensor]:
    model = parallelize(half_frozen_chain, plan, sample_batch=batch)
    model.train_step(batch)
    return {name: parameter.detach().clone() for name, parameter in model.parameters.items()}


def train_to_the_error(rank: int, plan: Plan) -> tuple[str, bool]:
    """Poison a gradient on the first rank only."""
    model = parallelize(chain, plan, sample_batch=vectors())
    before = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
    if rank == 0:
        next(iter(model.parameters.values())).register_hook(lambda gradient: gradient * float("inf"))
    try:
        model.train_step(vectors())
    except TrainingError as error:
        return str(error), all(torch.equal(p, before[name]) for name, p in model.parameters.items())
    return "", False


def buffers_held(_rank: int, plan: Plan, batch: Any) -> dict[str, torch.Tensor]:
    model = parallelize(tied_llama, plan, sample_batch=batch)
    placement = model.executions.placement(batch)
    executor = model.executions.executor([placement] * 2)
    stages = executor._runtime._stages
    return {name: buffer for stage in stages for name, buffer in stage.submod.named_buffers()}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2), Mesh(dp=2)])
def test_evaluation_comes_first_or_between_steps_and_changes_nothing(mesh: Mesh) -> None:
    """B55, B152, B166: the loss in evaluation mode, on every rank, without dropout and without division."""
    batch = vectors()
    model = reference_model(chain_with_dropout).eval()
    expected = model(**batch)["loss"].item()
    results = run_distributed(
        evaluate, mesh.world_size, chain_with_dropout, make_plan(mesh, "blocks.2"), batch
    )
    for before, after, _ in results:
        assert before == pytest.approx(expected, rel=1e-12)
        assert after != before
    assert len({result[:2] for result in results}) == 1


@pytest.mark.parametrize("cut", ["blocks.1", "blocks.2"])
def test_frozen_parameters_stay_and_others_train_exactly(cut: str) -> None:
    """B190: a stage that is frozen whole or in part gets no update, and passes on what others need."""
    batch = vectors()
    model = reference_model(half_frozen_chain)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(**batch)["loss"].backward()
    optimizer.step()
    expected = dict(model.named_parameters())
    for held in run_distributed(train_half_frozen, 2, make_plan(Mesh(pp=2), cut), batch):
        for name, parameter in held.items():
            torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_update() -> None:
    """B73, B192: inf on one rank raises the same error on all, and no parameter has changed on any."""
    results = run_distributed(train_to_the_error, 2, make_plan(Mesh(pp=2), "blocks.2"))
    assert all("not finite" in message and is_unchanged for message, is_unchanged in results)


def test_every_stage_has_the_buffers_of_the_whole_model() -> None:
    """B135, B139: rotary frequencies are not in the state dict, and are what the constructor made."""
    expected = dict(reference_model(tied_llama).named_buffers())
    batch = make_batch(4, seed=0)
    results = run_distributed(buffers_held, 2, make_plan(Mesh(pp=2), "model.layers.2"), batch)
    for held in results:
        assert held
        for name, buffer in held.items():
            original = expected[name.split("._stages.0.")[-1].removeprefix("_stages.0.")]
            assert torch.equal(buffer, original)


def test_a_model_without_a_loss_is_refused() -> None:
    """Training needs a loss among the outputs, and the message says which would do."""
    with pytest.raises(RecordingError, match="returns no loss"):
        parallelize(lambda: nn.Linear(4, 4), make_plan(Mesh(), ""), sample_batch=torch.zeros(8, 4))


def test_the_optimizer_holds_the_parameters_that_are_trained() -> None:
    """B143, B144: identity, not equality."""
    model = parallelize(chain, make_plan(Mesh(), ""), sample_batch=vectors())
    held = {id(p) for group in model.optimizer.param_groups for p in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters.values()}
