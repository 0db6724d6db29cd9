"""A parameter-server job in real processes: the coordinator in the test, servers and workers outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from helpers.processes import preloaded_context
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.layout import Layout, Shard, Variable, place_variables
from outsize.runtime.parameter_server.lost import CoordinatorLostError
from outsize.runtime.parameter_server.membership import Membership
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.partitioners import Partitioner
from outsize.runtime.parameter_server.server import Server
from outsize.runtime.parameter_server.settings import Settings
from outsize.runtime.parameter_server.update_policy import UpdatePolicy
from outsize.runtime.parameter_server.worker import StepFunction, Worker

# The store looks up its peers' names; where no name server answers, that must not cost five seconds each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

__all__ = ["Job", "make_settings", "running_job", "servers_in_threads", "start_worker_thread"]


def make_settings(
    variables: list[Variable],
    *,
    num_servers: int = 1,
    partitioner: Partitioner | None = None,
    optimizer: OptimizerSettings | None = None,
    policy: UpdatePolicy | None = None,
    version_wait_s: float = 20.0,
) -> Settings:
    """Return settings; plain SGD with learning rate 1 and asynchronous updates where nothing else is said."""
    layout: Layout = place_variables(variables, num_servers, partitioner)
    return Settings(
        layout,
        optimizer or OptimizerSettings("sgd", {"lr": 1.0}),
        policy or UpdatePolicy.asynchronous(),
        version_wait_s,
    )


class Job:
    """The running processes by name (``server/0``, ``worker/1``), and the coordinator."""

    def __init__(self, coordinator: Coordinator, steps: Mapping[str, StepFunction]) -> None:
        self.coordinator, self._steps = coordinator, steps
        self._processes: dict[str, BaseProcess] = {}

    def start_server(self, index: int) -> None:
        """Start a server, or the successor of a killed one."""
        self._start(f"server/{index}", _run_server, self.coordinator.membership, index)

    def start_worker(self, index: int) -> None:
        """Start a worker, or the replacement of a killed one."""
        self._start(f"worker/{index}", _run_worker, self.coordinator.membership, index, self._steps)

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process, by its id."""
        pid = self._processes[name].pid
        assert pid is not None
        os.kill(pid, how)

    def end(self) -> None:
        """Stop everything, by force what does not stop by itself."""
        self.coordinator.stop()
        deadline = time.monotonic() + 2
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join(5)

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        process = preloaded_context().Process(target=target, args=arguments, daemon=True)
        process.start()
        self._processes[name] = process


@contextmanager
def running_job(
    settings: Settings,
    steps: Mapping[str, StepFunction],
    *,
    num_workers: int,
    initial: Callable[[Shard], torch.Tensor] | None = None,
    **options: Any,
) -> Iterator[Job]:
    """Start a job of real processes, initialised (with zeros by default), and end it afterwards."""
    job = Job(Coordinator("test", settings, **options), steps)
    try:
        for server in range(settings.layout.num_servers):
            job.start_server(server)
        for worker in range(num_workers):
            job.start_worker(worker)
        job.coordinator.initialise(initial or (lambda shard: torch.zeros(shard.shape)))
        yield job
    finally:
        job.end()


def start_worker_thread(membership: Membership, index: int, steps: Mapping[str, StepFunction]) -> None:
    """Run a worker as a thread of this process, until the coordinator stops or gives it up for another."""

    def run() -> None:
        with suppress(CoordinatorLostError):
            Worker(membership, index, steps).run()

    threading.Thread(target=run, daemon=True).start()


@contextmanager
def servers_in_threads(
    settings: Settings, initial: Callable[[Shard], torch.Tensor] | None = None, **options: Any
) -> Iterator[Coordinator]:
    """Start servers as threads of this process: the same sessions and messages, without new processes."""
    with Coordinator("test", settings, **options) as coordinator:
        for index in range(settings.layout.num_servers):
            threading.Thread(target=Server(coordinator.membership, index).run, daemon=True).start()
        coordinator.initialise(initial or (lambda shard: torch.zeros(shard.shape)))
        yield coordinator


def _run_server(membership: Membership, index: int) -> None:
    torch.set_num_threads(1)
    try:
        Server(membership, index).run()
    except CoordinatorLostError:
        os._exit(3)
    os._exit(0)


def _run_worker(membership: Membership, index: int, steps: Mapping[str, StepFunction]) -> None:
    torch.set_num_threads(1)
    try:
        Worker(membership, index, steps).run()
    except CoordinatorLostError:
        os._exit(3)
    os._exit(0)
