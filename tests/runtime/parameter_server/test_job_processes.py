"""Training jobs in real processes: a killed worker costs nothing, a killed server is one error."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from helpers.server_jobs import make_job, train_one_process
from outsize.errors import TrainingError
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.parameter_server.checkpoint import load_whole
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.local_processes import LocalProcesses
from outsize.runtime.parameter_server.roles import EVALUATIONS
from outsize.runtime.parameter_server.run_job import coordinate, prepare_job, run_server_job

pytestmark = pytest.mark.distributed


def test_synchronous_training_with_a_killed_worker_equals_one_process(tmp_path: Path) -> None:
    """Five steps of AdamW on two servers; in the fourth a worker dies, and its part is done by another."""
    job = make_job(
        tmp_path,
        "synchronous",
        kills=True,
        num_servers=2,
        partitioner="min_size:64B:3",
        num_validation_batches=1,
        with_evaluator=True,
    )
    summary = run_server_job(prepare_job(job))
    assert (tmp_path / "killed").exists()
    losses, parameters, _ = train_one_process(job, range(5))
    assert summary.losses == pytest.approx(losses, rel=1e-12)
    found = load_whole(find_checkpoint(tmp_path / "run" / "checkpoints"))
    for name, value in parameters.items():
        assert (found[name] - value).abs().max() < 1e-10
    evaluated = json.loads((tmp_path / "run" / EVALUATIONS).read_text().splitlines()[-1])
    assert (evaluated["step"], evaluated["validation_loss"]) == pytest.approx(summary.validation_losses[-1])


def test_a_killed_server_ends_the_job_with_one_error(tmp_path: Path) -> None:
    """SIGKILL of server 1 in the middle: within 5 s there is one error that says how to go on."""
    job = make_job(tmp_path, "asynchronous", num_servers=2, num_steps=100_000)
    prepared = prepare_job(job)
    killed_at: list[float] = []

    def kill_once_it_trains(processes: LocalProcesses) -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.02)
        killed_at.append(time.monotonic())
        os.kill(processes.process_id("server/1"), signal.SIGKILL)

    with (
        Coordinator("test", prepared.settings) as coordinator,
        LocalProcesses(job, coordinator.membership, coordinator.abort) as processes,
    ):
        threading.Thread(target=kill_once_it_trains, args=(processes,), daemon=True).start()
        with pytest.raises(TrainingError, match="server/1 is lost") as caught:
            coordinate(prepared, coordinator)
        assert time.monotonic() - killed_at[0] < 5
    assert "--resume" in caught.value.attempt
