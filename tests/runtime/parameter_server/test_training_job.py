"""Training jobs: equal to one process, by rows too; checkpoints go to other strategies and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.server_jobs import GLOBAL_BATCH, SGD, make_job, run_in_threads, train_one_process
from outsize.errors import ModelError, PlanError
from outsize.model.argument import load_model
from outsize.plan.plan import Mesh, OptimizerSpec, Plan
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.parallelize import parallelize
from outsize.runtime.parameter_server.checkpoint import load_whole
from outsize.runtime.parameter_server.run_job import prepare_job

pytestmark = pytest.mark.distributed


def assert_saved(run: Path, expected: Mapping[str, torch.Tensor]) -> None:
    found = load_whole(find_checkpoint(run / "checkpoints"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("updates", "num_workers", "row_wise"),
    [("synchronous", 3, "*"), ("asynchronous", 1, "words.weight"), ("bounded:0", 1, "item.*, words.*")],
)
def test_embedding_rows_train_exactly(updates: str, num_workers: int, row_wise: str, tmp_path: Path) -> None:
    """Tables that no worker holds, in shards on two servers, trained by SGD: as in one process."""
    job = make_job(
        tmp_path,
        updates,
        num_workers=num_workers,
        num_servers=2,
        partitioner="fixed:3",
        row_wise=row_wise,
        optimizer=SGD,
    )
    losses, parameters, _ = train_one_process(job, range(5))
    summary = run_in_threads(job)
    assert summary.losses == pytest.approx(losses, rel=1e-12)
    assert_saved(tmp_path / "run", parameters)


def test_checkpoints_go_to_another_strategy_and_back(tmp_path: Path) -> None:
    """AdamW: two steps on servers, two of a plain plan, one on servers again, as five of one process."""
    job = make_job(tmp_path, "synchronous", num_servers=2, num_steps=2)
    _, parameters, _ = train_one_process(job, range(5))
    run_in_threads(job)
    source = load_model(job.model)
    plan = replace(job.plan, strategy="mirrored", mesh=Mesh(), state_sharding="none")
    model = parallelize(source.factory, plan, sample_batch=source.sample_batch(plan.microbatch_size))
    checkpoints = tmp_path / "run" / "checkpoints"
    model.load_checkpoint(checkpoints)
    for step in (2, 3):
        model.train_step(source.make_batch(GLOBAL_BATCH, step=step))  # type: ignore[misc,call-arg]
    model.save_checkpoint(checkpoints)
    run_in_threads(replace(job, num_steps=5, checkpoint=str(find_checkpoint(checkpoints))))
    assert_saved(tmp_path / "run", parameters)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 5]


def test_asynchronous_workers_share_the_steps(tmp_path: Path) -> None:
    """Two workers do eight updates in all; evaluations and checkpoints come where they are due."""
    job = make_job(
        tmp_path,
        "asynchronous",
        num_steps=8,
        evaluate_every=3,
        checkpoint_every=4,
        num_validation_batches=1,
    )
    summary = run_in_threads(job)
    assert sum(summary.staleness.values()) == len(summary.losses) == 8
    assert [step for step, _ in summary.validation_losses] == [0, 3, 6, 8]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000008"]


def test_local_steps_are_averaged_by_the_outer_optimizer(tmp_path: Path) -> None:
    """Two workers, two updates of two local steps of SGD, against DiLoCo written out."""
    job = make_job(tmp_path, "local:2", num_steps=4, optimizer=SGD)
    source, (_, _, module) = load_model(job.model), train_one_process(job, [])
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for update in range(2):
        before = {name: value.detach().clone() for name, value in module.named_parameters()}
        moved = {name: torch.zeros_like(value) for name, value in before.items()}
        for part in range(2):
            module.load_state_dict(before)
            inner = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            for step in (2 * update, 2 * update + 1):
                batch = source.make_batch(GLOBAL_BATCH, step=step)  # type: ignore[misc,call-arg]
                rows = slice(0, 6) if part == 0 else slice(6, 10)  # micro-batches of 3, 3, 2, 2
                has_label = (batch["labels"] != -1).double()
                share = has_label[rows].sum() / has_label.sum()
                inner.zero_grad()
                loss = module(**{name: value[rows] for name, value in batch.items()})["loss"]
                (loss * share * 2).backward()
                inner.step()
            for name, value in module.named_parameters():
                moved[name] += (before[name] - value.detach()) / 2
        module.load_state_dict(before)
        for name, value in module.named_parameters():
            value.grad = moved[name] if value.requires_grad else None  # zero for the unused layer
        outer.step()
    run_in_threads(job)
    assert_saved(tmp_path / "run", {name: value.detach() for name, value in module.named_parameters()})


@pytest.mark.parametrize(
    ("updates", "changes", "message"),
    [
        ("synchronous:2", {}, "2 of 2 workers are to be backup workers"),
        ("local:2", {"num_steps": 5}, "number of steps, 5, is not a number of updates"),
        ("local:2", {"num_steps": 4, "evaluate_every": 3}, "between evaluations, 3, is not"),
        ("local:5", {"row_wise": "*"}, "Local steps keep no rows"),
        ("synchronous", {"optimizer": OptimizerSpec(max_gradient_norm=1.0)}, "cannot be clipped"),
        ("synchronous", {"num_servers": 0}, "0 servers hold nothing"),
        ("synchronous", {"num_servers": 9}, "9 servers are more than the model's 8 variables"),
        ("synchronous", {"num_workers": 6}, "global batch of 10 is too small"),
        ("synchronous", {"row_wise": "head.*"}, "No table is called 'head.\\*'"),
        ("synchronous", {"partitioner": "fixed:0"}, "'fixed:0' is not a partitioner"),
        ("synchronous", {"with_evaluator": True}, "The evaluator has nothing to do"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_before_the_start(
    updates: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Each is one error in words; no process was started for it."""
    job = make_job(tmp_path, updates, **changes)
    with pytest.raises(PlanError, match=message):
        prepare_job(job)


def test_a_model_that_writes_buffers_is_refused(tmp_path: Path) -> None:
    """A counter in the state dict: no server would have it."""
    job = make_job(tmp_path, "synchronous", num_workers=1)
    path = tmp_path / "ranker.py"
    counting = "self.double()\n        self.register_buffer('calls', torch.zeros(()))"
    text = path.read_text().replace("self.double()", counting)
    path.write_text(text.replace("hidden = torch.tanh(", "self.calls += 1\n        hidden = torch.tanh(", 1))
    with pytest.raises(ModelError, match="writes its buffer calls"):
        run_in_threads(job)


def test_a_plan_that_splits_the_model_is_refused(tmp_path: Path) -> None:
    """Workers compute whole passes."""
    job = make_job(tmp_path, "synchronous")
    plan: Plan = replace(job.plan, mesh=Mesh(dp=2, tp=2))
    with pytest.raises(PlanError, match="whole passes"):
        prepare_job(replace(job, plan=plan))
