"""Local launches: results by rank, one readable error, nothing left running, loopback only."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from outsize.errors import DoesNotFitError, LaunchError
from outsize.runtime.launch import LocalLaunch, launch_local

pytestmark = pytest.mark.distributed


def _all_reduce_rank() -> tuple[int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), total.item()


def _listening_addresses() -> set[str]:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    pids = (os.getpid(), os.getppid())
    listeners = [
        connection
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    return {connection.laddr.ip for connection in listeners}


def _one_does_not_fit() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise DoesNotFitError("Device 1 is full.", why="It holds 1 GiB.", attempt="more devices.")
    dist.barrier()


def _one_breaks(folder: str) -> None:
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        raise ValueError("a mistake in the model")
    time.sleep(60)


def _one_is_killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _note_and_sleep(folder: str) -> None:
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)


def _are_gone(folder: Path) -> bool:
    pids = [int(path.read_text()) for path in folder.iterdir() if path.name.isdigit()]
    return bool(pids) and not any(psutil.pid_exists(pid) for pid in pids)


def test_every_process_returns_its_result_by_rank() -> None:
    """Three processes sum their ranks to 3."""
    results = launch_local(LocalLaunch(3, timeout_s=60), _all_reduce_rank)
    assert [total for _, total in results] == [3.0] * 3
    assert len({pid for pid, _ in results}) == 3


def test_workers_listen_on_the_loopback_address_only() -> None:
    """Neither gloo nor the store opens a port to the network."""
    for addresses in launch_local(LocalLaunch(2, timeout_s=60), _listening_addresses):
        assert addresses <= {"127.0.0.1", "::1"}
    here = psutil.Process().net_connections("inet")
    assert {c.laddr.ip for c in here if c.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}


def test_an_outsize_error_arrives_as_it_was_raised() -> None:
    """What, why and attempt of rank 1's error come back although rank 0 loses its connection."""
    with pytest.raises(DoesNotFitError) as caught:
        launch_local(LocalLaunch(2, timeout_s=60), _one_does_not_fit)
    assert caught.value.what == "Device 1 is full."
    assert caught.value.why == "It holds 1 GiB."
    assert caught.value.attempt == "more devices."


def test_an_unexpected_error_names_the_process_and_keeps_the_traceback_in_a_file(tmp_path: Path) -> None:
    """The message says which process and error; all processes are ended."""
    with pytest.raises(LaunchError, match="Process 1 failed: ValueError: a mistake in the model") as caught:
        launch_local(LocalLaunch(2, log_folder=tmp_path, timeout_s=60), _one_breaks, str(tmp_path))
    assert "Traceback" not in str(caught.value)
    assert "_one_breaks" in (tmp_path / "traceback-rank1.txt").read_text()
    assert _are_gone(tmp_path)


def test_a_killed_process_ends_the_job() -> None:
    """SIGKILL of one process is told by name, long before the timeout."""
    started = time.monotonic()
    with pytest.raises(LaunchError, match="SIGKILL"):
        launch_local(LocalLaunch(2, timeout_s=60), _one_is_killed)
    assert time.monotonic() - started < 30


def test_a_timeout_ends_every_process(tmp_path: Path) -> None:
    """A job that hangs is ended and said to have hung."""
    with pytest.raises(LaunchError, match="did not finish in 3 s"):
        launch_local(LocalLaunch(2, timeout_s=3), _note_and_sleep, str(tmp_path))
    assert _are_gone(tmp_path)


def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    """Ctrl-C raises KeyboardInterrupt here, ends the processes and puts the signal handlers back."""
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        launch_local(LocalLaunch(2, timeout_s=60), _note_and_sleep, str(tmp_path))
    assert _are_gone(tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
