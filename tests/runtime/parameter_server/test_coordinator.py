"""The coordinator with real servers and workers, as threads: errors, forgiveness, missing workers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from helpers.parameter_servers import make_settings, servers_in_threads, start_worker_thread
from outsize.errors import LaunchError, TrainingError
from outsize.runtime.parameter_server.coordinator import MAX_IGNORED_SERVER_ERRORS
from outsize.runtime.parameter_server.layout import Variable
from outsize.runtime.parameter_server.lost import ServerLostError, StepFailedError
from outsize.runtime.parameter_server.membership import Membership
from outsize.runtime.parameter_server.session import connect
from outsize.runtime.parameter_server.step_argument import PerWorker
from outsize.runtime.parameter_server.worker import StepContext

pytestmark = pytest.mark.distributed

_SETTINGS = make_settings([Variable("a", (), torch.float64)])


def _echo(_context: StepContext, argument: Any) -> Any:
    return argument


def _divide(_context: StepContext, argument: Any) -> float:
    return 1 / argument["by"]


def _lose_server(context: StepContext, times: int) -> int:
    context.memory["lost"] = context.memory.get("lost", 0) + 1
    if context.memory["lost"] <= times:
        raise ServerLostError("server/0", "a cable was pulled for a moment")
    return int(context.memory["lost"])


_STEPS = {"echo": _echo, "divide": _divide, "lose_server": _lose_server}


def test_a_late_worker_gets_work_in_under_a_second() -> None:
    """Steps wait for a worker that joins after the start; once it runs, its first answer comes quickly."""
    with servers_in_threads(_SETTINGS) as coordinator:
        future = coordinator.schedule("echo", PerWorker(["zero", "one"]))
        assert not coordinator.is_done()
        delays = []
        for _replacement in range(3):  # one name lookup of this machine may cost a second: the best counts
            started = time.monotonic()
            start_worker_thread(coordinator.membership, 1, _STEPS)
            assert future.result(20) == "one"
            delays.append(time.monotonic() - started)
            future = coordinator.schedule("echo", PerWorker(["zero", "one"]))
            future.result(20)
        assert min(delays) < 1


def test_the_error_of_a_step_arrives_with_its_place() -> None:
    """The worker's traceback is told once; worker and coordinator go on."""
    with servers_in_threads(_SETTINGS) as coordinator:
        start_worker_thread(coordinator.membership, 0, _STEPS)
        future = coordinator.schedule("divide", {"by": 0})
        with pytest.raises(StepFailedError, match="ZeroDivisionError") as caught:
            coordinator.join()
        assert (caught.value.step, caught.value.worker) == ("divide", 0)
        assert "_divide" in caught.value.text
        with pytest.raises(StepFailedError):
            future.result()
        assert coordinator.schedule("divide", {"by": 4}).result(20) == 0.25
        coordinator.schedule("unknown")
        with pytest.raises(StepFailedError, match="unknown step 'unknown'"):
            coordinator.join()


def test_two_passing_server_errors_are_forgiven_and_the_third_is_not() -> None:
    """The server answers the coordinator, so the step is tried again; after three times it counts."""
    with servers_in_threads(_SETTINGS) as coordinator:
        start_worker_thread(coordinator.membership, 0, _STEPS)
        future = coordinator.schedule("lose_server", MAX_IGNORED_SERVER_ERRORS)
        coordinator.join()
        assert future.result() == MAX_IGNORED_SERVER_ERRORS + 1
    with servers_in_threads(_SETTINGS) as coordinator:
        start_worker_thread(coordinator.membership, 0, _STEPS)
        coordinator.schedule("lose_server", MAX_IGNORED_SERVER_ERRORS + 1)
        with pytest.raises(ServerLostError, match="cable"):
            coordinator.join()


def test_a_job_without_workers_ends_with_a_reason() -> None:
    """The wait has a limit, unlike TensorFlow's."""
    with servers_in_threads(_SETTINGS, worker_timeout_s=0.2) as coordinator:
        coordinator.schedule("echo")
        with pytest.raises(TrainingError, match=r"no worker was there for 0\.2 s"):
            coordinator.join()


def test_only_names_and_plain_data_can_be_scheduled() -> None:
    """A function, and the future of another step, are refused before they are queued."""
    with servers_in_threads(_SETTINGS) as coordinator:
        with pytest.raises(TrainingError, match="not the name of a step"):
            coordinator.schedule(_echo)  # type: ignore[arg-type]
        future = coordinator.schedule("echo")
        with pytest.raises(TrainingError, match="fetch its result first"):
            coordinator.schedule("echo", [future])


def test_a_role_of_another_job_is_refused() -> None:
    """A port that now belongs to another job is noticed before anything is exchanged."""
    with servers_in_threads(_SETTINGS) as coordinator:
        mine = coordinator.membership
        with pytest.raises(LaunchError, match="runs job 'test'"):
            Membership(mine.address, mine.port, "yesterday").client(10)


def test_a_role_that_never_starts_is_named() -> None:
    """Waiting for server 7 ends after the time allowed."""
    with servers_in_threads(_SETTINGS) as coordinator, pytest.raises(LaunchError, match="server/7"):
        connect(coordinator.membership, "server/7", "worker/0", start_timeout_s=0.2)


def test_first_values_of_a_wrong_shape_are_refused() -> None:
    """An initialiser is asked for one shard and must answer with its shape."""
    with (
        pytest.raises(TrainingError, match="first values of shape"),
        servers_in_threads(_SETTINGS, lambda _shard: torch.zeros(3)),
    ):
        pass
