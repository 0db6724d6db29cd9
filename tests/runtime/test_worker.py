"""Whole jobs in local processes: what they write, how they go on, and how they fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outsize.errors import DoesNotFitError, ModelError, PlanError
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.worker import TrainingJob, run_job

pytestmark = pytest.mark.distributed

MIB = 2**20
MODEL = '''
import torch
from torch import nn

class Chain(nn.Module):
    """Eight square layers of 4 MiB and a mean-squared error: 32 MiB of parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))

    def forward(self, inputs, targets):
        for layer in self.layers:
            inputs = inputs + 0.1 * torch.tanh(layer(inputs))
        return {"loss": nn.functional.mse_loss(inputs, targets)}

def build():
    return Chain()

def batch(num_samples, *, step=0, split="train"):
    generator = torch.Generator().manual_seed(step if split == "train" else 1_000_000 + step)
    inputs = torch.randn(num_samples, 1024, generator=generator)
    return {"inputs": inputs, "targets": -inputs}

def fixed(num_samples):
    return batch(num_samples)
'''


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    (tmp_path / "chain.py").write_text(MODEL)
    (tmp_path / "run").mkdir()
    return TrainingJob(
        model=f"{tmp_path / 'chain.py'}:build",
        plan=make_plan(Mesh(pp=2)),
        run_directory=str(tmp_path / "run"),
        num_steps=4,
        evaluate_every=2,
        num_validation_batches=1,
        show_progress=False,
    )


def make_plan(mesh: Mesh, **changes: Any) -> Plan:
    cuts = [f"layers.{8 * stage // mesh.pp}" for stage in range(1, mesh.pp)]
    stages = tuple(StageSpec(index, label) for index, label in enumerate(("", *cuts)))
    plan = Plan("pipeline_parallel", mesh, stages, ScheduleSpec("1f1b", 2), 8)
    return replace(plan, **changes)


def metrics_of(job: TrainingJob) -> list[dict[str, Any]]:
    lines = (Path(job.run_directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_job_reports_writes_metrics_and_goes_on_from_its_checkpoint(job: TrainingJob) -> None:
    """Four steps with evaluations, then two more under another plan: the numbers continue."""
    reports = run_job(job)
    assert [report.rank for report in reports] == [0, 1]
    assert [step for step, _ in reports[0].validation_losses] == [0, 2, 4]
    assert reports[0].validation_losses[-1][1] < reports[0].validation_losses[0][1]
    assert reports[0].num_tokens == 4 * 8, "samples count once, whatever the layout (B56)"
    steps = [record for record in metrics_of(job) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["num_tokens"] for record in steps] == [8, 16, 24, 32]
    assert len(steps[0]["peak_memory_bytes"]) == 2

    again = run_job(replace(job, plan=make_plan(Mesh()), resume=True, num_steps=6))
    assert again[0].validation_losses[0] == pytest.approx(reports[0].validation_losses[-1], rel=1e-6)
    steps = [record for record in metrics_of(job) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]


def test_each_process_holds_its_own_part_only(job: TrainingJob) -> None:
    """Four ranks of a model of 128 MiB of training state: each peaks at a quarter, not at the whole."""
    plan = make_plan(Mesh(pp=4), device_memory_bytes=80 * MIB)
    reports = run_job(replace(job, plan=plan, num_steps=2, num_validation_batches=0, write_checkpoint=False))
    for report in reports:
        assert report.peak_memory_bytes is not None
        assert 32 * MIB <= report.peak_memory_bytes < 60 * MIB


def test_a_whole_replica_does_not_fit_and_says_so(job: TrainingJob) -> None:
    """The same device memory, mirrored: a readable error that names device and limit."""
    plan = make_plan(Mesh(dp=2), device_memory_bytes=80 * MIB)
    with pytest.raises(DoesNotFitError, match=r"Device [01] ran out of memory while") as caught:
        run_job(replace(job, plan=plan))
    assert "holds 80.0 MiB" in caught.value.why


def test_a_plan_that_cannot_run_is_refused_before_processes_start(job: TrainingJob) -> None:
    """More micro-batches than samples, or an axis that is not there: no log folder is ever made."""
    with pytest.raises(PlanError, match="too small for 9 micro-batches"):
        run_job(replace(job, plan=make_plan(Mesh(pp=2), schedule=ScheduleSpec("1f1b", 9))))
    with pytest.raises(PlanError, match="with ep"):
        run_job(replace(job, plan=make_plan(Mesh(ep=2))))
    assert not (Path(job.run_directory) / "logs").exists()


def test_validation_needs_data_that_knows_splits(job: TrainingJob) -> None:
    """A data function without `split` cannot validate, and that is said before processes start."""
    data = job.model.replace(":build", ":fixed")
    with pytest.raises(ModelError, match="no batches for validation"):
        run_job(replace(job, data=data))
    assert not (Path(job.run_directory) / "logs").exists()


def test_a_cut_that_the_model_does_not_have_is_an_error(job: TrainingJob) -> None:
    """A plan made for another model is refused by name of the block."""
    stages = (StageSpec(0, ""), StageSpec(1, "encoder.3"))
    with pytest.raises(PlanError, match=r"encoder\.3"):
        run_job(replace(job, plan=make_plan(Mesh(pp=2), stages=stages)))
