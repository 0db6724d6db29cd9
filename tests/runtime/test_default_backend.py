"""A pipeline in a process group that was started without a word about backends, as on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.models import train_reference
from helpers.processes import run_distributed
from helpers.tiny_language_model import tied_model, token_batch
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime import pipeline
from outsize.runtime.early_receives import post_receives_early
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

BATCHES = [token_batch(6, seed=seed, labels="ragged") for seed in (0, 0, 1, 0, 1)]
OPTIMIZER = OptimizerSpec(learning_rate=1e-2)
PLAN = Plan(
    "pipeline_parallel",
    Mesh(pp=2),
    (StageSpec(0, ""), StageSpec(1, "blocks.4")),
    ScheduleSpec("1f1b", 3),
    6,
    optimizer=OPTIMIZER,
)


def train(rank: int, store: str) -> dict[str, Any]:
    """Train, and evaluate after each step whose loss is less than any before."""
    dist.init_process_group(store=dist.FileStore(store, 2), rank=rank, world_size=2)
    posted_early: list[Any] = []
    pipeline.post_receives_early = lambda order: posted_early.append(order) or post_receives_early(order)
    model = parallelize(tied_model, PLAN, sample_batch=BATCHES[0])
    losses: list[float] = []
    evaluations: list[float | None] = []
    for batch in BATCHES:
        loss = model.train_step(batch).loss
        evaluations.append(model.evaluate(batch) if loss < min(losses, default=2.9) else None)
        losses.append(loss)
    return {"losses": losses, "evaluations": evaluations, "num_early": len(posted_early)}


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    return run_distributed(train, 2, str(store), process_group=False)


def test_a_pipeline_runs_where_no_backend_was_chosen(by_rank: list[dict[str, Any]]) -> None:
    """B181: without a GPU and without any option it trains, exactly, and receives early as gloo allows."""
    losses, *_ = train_reference(tied_model, BATCHES, OPTIMIZER)
    for found in by_rank:
        assert found["losses"] == pytest.approx(losses, rel=1e-10)
        assert found["num_early"] > 0


def test_every_rank_decides_alike_whether_to_evaluate(by_rank: list[dict[str, Any]]) -> None:
    """B156: an evaluation that depends on the loss is entered by all or none, and all know its loss."""
    first, last = (found["evaluations"] for found in by_rank)
    assert first == last
    assert 0 < sum(each is not None for each in first) < len(BATCHES)
