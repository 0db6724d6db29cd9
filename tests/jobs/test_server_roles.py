"""A job with parameter servers whose processes a launcher starts: chief, worker, ps and evaluator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import helpers.parameter_servers  # noqa: F401 - it keeps look-ups of names short
from helpers.processes import run_distributed
from helpers.server_jobs import MODEL
from outsize.errors import LaunchError
from outsize.jobs.planning import PlanRequest
from outsize.jobs.server_training import ServerSettings
from outsize.jobs.training import RunSettings, train_model
from outsize.plan.plan import Mesh
from outsize.runtime.job_store import open_store

TASKS = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]


def _train(rank: int, folder: str, port: int, num_workers: int) -> list[float]:
    role, index = TASKS[rank]
    cluster = {
        "chief": [f"127.0.0.1:{port}"],
        "worker": ["127.0.0.1:2222", "127.0.0.1:2223"],
        "ps": ["127.0.0.1:2224"],
    }
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
    os.chdir(folder)
    request = PlanRequest(
        model="ranker.py:build",
        cluster="2x1x24GiB",
        global_batch=8,
        strategy="parameter_server",
        mesh=Mesh(dp=num_workers),
    )
    settings = RunSettings(
        num_steps=3, num_validation_batches=1, show_progress=False, servers=ServerSettings("asynchronous")
    )
    return [report.last_loss for report in train_model(request, settings)]


@pytest.mark.distributed
def test_each_task_of_a_cluster_takes_its_role(tmp_path: Path) -> None:
    """The chief coordinates and reports; the evaluator reads the checkpoint; all find each other."""
    (tmp_path / "ranker.py").write_text(f"KILLS = False\n{MODEL}")
    port = int(open_store("127.0.0.1").port)
    reports = run_distributed(_train, len(TASKS), str(tmp_path), port, 2, process_group=False)
    assert [len(report) for report in reports] == [1, 0, 0, 0, 0]
    run = tmp_path / "runs" / "0001"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:4]]
    assert losses[-1] == reports[0][0]
    assert json.loads((run / "evaluations.jsonl").read_text())["step"] == 3


def test_another_number_of_workers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers are told by the chief, before anything trains."""
    (tmp_path / "ranker.py").write_text(f"KILLS = False\n{MODEL}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(LaunchError, match="The job has 1 workers, and tf_config starts 2"):
        _train(0, str(tmp_path), 1, 1)
