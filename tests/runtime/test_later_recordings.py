"""Batches that use other parameters than the sample batch: they are trained and saved too, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.exact_training import assert_equal_to_reference, train
from helpers.models import reference_model, train_reference
from helpers.processes import run_distributed
from outsize.errors import PlanError
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

SHORT, LONG = 3, 5
OPTIMIZER = OptimizerSpec(weight_decay=0.1, max_gradient_norm=None)


class ByLength(nn.Module):
    """Uses a block for long inputs alone, and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.for_long, self.unused, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("unread", torch.ones(2))
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh()
        if x.shape[1] == LONG:
            hidden = self.for_long(hidden)
        return {"loss": self.last(hidden).square().mean()}


class Scoring(ByLength):
    """In evaluation the last stage uses a weight of the first."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.last(self.first(x).tanh())
        return {"loss": (hidden if self.training else hidden @ self.first.weight).square().mean()}


def make_plan(num_ranks: int) -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(("", "last")[:num_ranks]))
    name = "1f1b" if num_ranks > 1 else "gpipe"
    return Plan(
        "pipeline_parallel", Mesh(pp=num_ranks), stages, ScheduleSpec(name, 2), 4, optimizer=OPTIMIZER
    )


def make_batch(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {"x": torch.randn(4, length, 4, dtype=torch.float64, generator=generator)}


BATCHES = [make_batch(length) for length in (SHORT, LONG, LONG)]


def train_and_save(_rank: int, num_ranks: int, folder: Path) -> set[str]:
    """Train with batches of both kinds and compare with one process; return the parameters that are held."""
    plan = make_plan(num_ranks)
    found = train(ByLength, plan, BATCHES)
    assert_equal_to_reference(found, train_reference(ByLength, BATCHES, OPTIMIZER), plan)
    model = parallelize(ByLength, plan, sample_batch=BATCHES[0])
    model.train_step(BATCHES[1])
    model.save_checkpoint(folder)
    if num_ranks > 1:
        scoring = parallelize(Scoring, plan, sample_batch=BATCHES[0])
        with pytest.raises(PlanError, match=r"first\.weight is used on pipeline rank 1 .* in evaluation"):
            scoring.evaluate(BATCHES[0])
        assert scoring.train_step(BATCHES[0]).loss > 0
    return set(found.parameters)


@pytest.mark.distributed
def test_every_parameter_is_held_trained_and_saved_though_the_sample_batch_uses_few(tmp_path: Path) -> None:
    """What only long inputs use is trained where it is needed; what nothing uses is in the checkpoint.

    A parameter that evaluation alone uses in another stage is refused by name, on every process.
    """
    held = run_distributed(train_and_save, 2, 2, tmp_path)
    assert [name for name in held[0] if name.startswith("last")] == []
    assert held[0] | held[1] == {name for name, _ in ByLength().named_parameters()}
    assert train_and_save(0, 1, tmp_path / "alone") == held[0] | held[1]
    alone = parallelize(ByLength, make_plan(1), sample_batch=BATCHES[0])
    alone.load_checkpoint(tmp_path)
    before = reference_model(ByLength)
    assert torch.equal(alone.parameters["unused.weight"], before.get_parameter("unused.weight"))
    assert not torch.equal(alone.parameters["for_long.weight"], before.get_parameter("for_long.weight"))
    assert "unread" in alone._entries()
