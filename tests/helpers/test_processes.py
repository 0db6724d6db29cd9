"""The test helper itself: results, failures, deaths and hangs come back, and nothing is left running."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from helpers.processes import WorkerFailedError, run_distributed

pytestmark = pytest.mark.distributed


def _sum_of_ranks(rank: int, factor: int) -> tuple[int, float]:
    total = torch.tensor(float(rank * factor))
    dist.all_reduce(total)
    return os.getpid(), total.item()


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("this rank is broken")
    dist.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _sleep(_rank: int) -> None:
    time.sleep(60)


def test_every_rank_runs_in_its_own_process_and_answers() -> None:
    """Three ranks have three process ids and agree on the sum 2 * (0 + 1 + 2)."""
    results = run_distributed(_sum_of_ranks, 3, 2)
    assert len({pid for pid, _ in results}) == 3
    assert [total for _, total in results] == [6.0] * 3
    assert not any(psutil.pid_exists(pid) for pid, _ in results)


def test_a_rank_that_raises_fails_the_call_with_its_error() -> None:
    """The error of rank 1 arrives although rank 0 waits in a barrier."""
    with pytest.raises(WorkerFailedError, match="this rank is broken") as caught:
        run_distributed(_fail_on_one, 2)
    assert isinstance(caught.value.error, ValueError)


def test_a_rank_that_is_killed_is_noticed_at_once() -> None:
    """A SIGKILL gives exit code -9 long before the timeout."""
    started = time.monotonic()
    with pytest.raises(WorkerFailedError, match="exit code"):
        run_distributed(_die_on_one, 2, timeout_s=50)
    assert time.monotonic() - started < 40


def test_a_hang_is_a_failure() -> None:
    """A rank that does not answer in time fails the call and is killed."""
    with pytest.raises(WorkerFailedError, match="did not finish in 1 s"):
        run_distributed(_sleep, 1, timeout_s=1)
