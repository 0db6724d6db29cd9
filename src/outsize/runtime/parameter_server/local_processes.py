"""The processes of a training job on this machine: started, watched, replaced where that helps, and ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from outsize.errors import LaunchError, OutsizeError
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.lost import CoordinatorLostError
from outsize.runtime.parameter_server.membership import Membership, wait_for
from outsize.runtime.parameter_server.roles import ROLES

__all__ = ["LocalProcesses"]

_MAX_REPLACEMENTS = 3
"""A worker killed more often than this has a reason to die."""

_LOST_COORDINATOR = 3
"""Exit code of a worker that the coordinator gave up because it was frozen, for example."""

_PRELOADED = ["outsize.runtime.parameter_server.roles", "torch._dynamo", "torch.distributed.checkpoint"]
_STOP_TIMEOUT_S = 1.0  # all is saved by then
_WATCH_S = 0.2
_FOREVER_S = 1e8

_log = logging.getLogger(__name__)


class LocalProcesses:
    """Servers, workers and the evaluator, by name (``server/0``); each writes to ``logs/`` of the run.

    A worker that was killed is replaced; one that failed ends the job through ``on_failure``. A server's end
    is noticed by the coordinator, which is connected to it.
    """

    def __init__(
        self, job: ParameterServerJob, membership: Membership, on_failure: Callable[[OutsizeError], None]
    ) -> None:
        self._job, self._membership, self._on_failure = job, membership, on_failure
        self._logs = Path(job.run_directory) / "logs"
        self._processes: dict[str, BaseProcess] = {}
        self._replacements: Counter[str] = Counter()
        self._is_ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LocalProcesses:
        self._logs.mkdir(parents=True, exist_ok=True)
        names = [f"server/{index}" for index in range(self._job.num_servers)]
        names += [f"worker/{index}" for index in range(self._job.num_workers)]
        names += ["evaluator/0"] if self._job.with_evaluator else []
        for name in names:
            self._start(name)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _place: TracebackType | None
    ) -> None:
        """End everything: first an evaluator that has a last checkpoint to read, then all by force."""
        evaluator = self._processes.get("evaluator/0")
        if evaluator is not None and kind is None:
            evaluator.join()
        self._is_ending.set()
        self._watcher.join()
        deadline = time.monotonic() + (_STOP_TIMEOUT_S if kind is None else 0.0)
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    def process_id(self, name: str) -> int:
        """Return the id of the process that has this name now."""
        process_id = self._processes[name].pid
        assert process_id is not None
        return process_id

    def _start(self, name: str) -> None:
        arguments = (name, self._job, self._membership, self._log_file(name))
        process = _context().Process(target=_run, args=arguments, daemon=True, name=name)
        process.start()
        self._processes[name] = process

    def _log_file(self, name: str) -> Path:
        return self._logs / f"{name.replace('/', '-')}.log"

    def _watch(self) -> None:
        watched = dict(self._processes)
        while not self._is_ending.is_set():
            ended = wait([process.sentinel for process in watched.values()], _WATCH_S)
            for name in [name for name, process in watched.items() if process.sentinel in ended]:
                code = watched.pop(name).exitcode
                if code and not self._is_ending.is_set() and self._handle_end(name, code):
                    watched[name] = self._processes[name]

    def _handle_end(self, name: str, code: int) -> bool:
        """Replace a worker that was killed, and say whether that was done; report one that cannot be."""
        role = name.partition("/")[0]
        if role == "server":
            return False
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        is_replaceable = role == "worker" and (code < 0 or code == _LOST_COORDINATOR)
        if is_replaceable and self._replacements[name] < _MAX_REPLACEMENTS:
            self._replacements[name] += 1
            _log.warning("%s ended (%s); a replacement is started", name, how)
            self._start(name)
            return True
        self._on_failure(
            LaunchError(
                f"The process {name} ended ({how}).",
                why=f"It was replaced {self._replacements[name]} times before."
                if is_replaceable
                else "It failed; its log has the traceback.",
                attempt=f"{self._log_file(name)}.",
            )
        )
        return False


def _context() -> ForkServerContext | SpawnContext:
    """Return a context whose processes start with torch imported, where the system can fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run(name: str, job: ParameterServerJob, membership: Membership, log_file: Path) -> None:
    """Be a role until the job ends; what is printed, and what goes wrong, is in the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator is interrupted, and ends the others
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    role, _, index = name.partition("/")
    if role == "evaluator":  # which has no session with the coordinator
        threading.Thread(target=_end_with_coordinator, args=(membership,), daemon=True).start()
    code = 1
    try:
        ROLES[role](job, membership, int(index))
        code = 0
    except CoordinatorLostError as error:
        print(error, file=sys.stderr)
        code = _LOST_COORDINATOR
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no waiting for sessions whose peers are gone


def _end_with_coordinator(membership: Membership) -> None:
    try:
        wait_for(membership.client(), "never", _FOREVER_S)
    except CoordinatorLostError:
        os._exit(1)
