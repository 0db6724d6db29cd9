"""Training as a part of a job that something else started: two tasks of a TF_CONFIG, each a process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from helpers.processes import run_distributed
from outsize.errors import LaunchError
from outsize.jobs.planning import PlanRequest
from outsize.jobs.training import RunSettings, train_model
from outsize.plan.plan import Mesh
from outsize.runtime.job_store import open_store

MODEL = """
import torch
from torch import nn

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.linear(x).square().mean()}

def build():
    return Regression()

def batch(num_samples, *, step=0):
    return {"x": torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(step))}
"""


def _train(rank: int, folder: str, port: int, mesh: Mesh, role: str) -> list[tuple[int, float]]:
    cluster = {"worker": [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]}
    task = {"type": role, "index": str(rank)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
    os.chdir(folder)
    request = PlanRequest(model="model.py:build", cluster="2x1x24GiB", global_batch=6, mesh=mesh)
    settings = RunSettings(num_steps=2, show_progress=False)
    return [(report.rank, report.last_loss) for report in train_model(request, settings)]


def _free_port() -> int:
    return int(open_store("127.0.0.1").port)


@pytest.mark.distributed
def test_two_tasks_of_a_cluster_train_one_model_in_one_directory(tmp_path: Path) -> None:
    """Each joins as the rank its description says; the first names the run, and the loss is the same."""
    (tmp_path / "model.py").write_text(MODEL)
    port = _free_port()
    arguments = (str(tmp_path), port, Mesh(dp=2), "worker")
    [(first, loss)], [(second, other_loss)] = run_distributed(_train, 2, *arguments, process_group=False)
    assert (first, second) == (0, 1)
    assert loss == other_loss
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["0001"]
    assert (tmp_path / "runs" / "0001" / "checkpoints" / "latest").read_text().strip() == "step-00000002"


def test_a_plan_for_another_number_of_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both numbers are told before anything trains."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(LaunchError, match="needs 1 processes, and tf_config starts 2"):
        _train(0, str(tmp_path), _free_port(), Mesh(), "worker")


def test_a_role_that_trains_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluator stands outside the cluster; a mesh strategy has no work for it."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(LaunchError, match="as evaluator"):
        _train(0, str(tmp_path), 1, Mesh(), "evaluator")
