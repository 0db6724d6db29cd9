"""The coordinator: gives servers their first values, hands steps to workers, saves and restores."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from outsize.errors import OutsizeError, TrainingError
from outsize.runtime.parameter_server.checkpoint import read_info
from outsize.runtime.parameter_server.failures import error_of
from outsize.runtime.parameter_server.layout import Shard
from outsize.runtime.parameter_server.lost import PeerLostError, ServerLostError, StepFailedError
from outsize.runtime.parameter_server.membership import host_store
from outsize.runtime.parameter_server.protocol import Kind
from outsize.runtime.parameter_server.server_control import STOP_TIMEOUT_S, ServerControl
from outsize.runtime.parameter_server.session import Listener, Message, Session
from outsize.runtime.parameter_server.settings import SETTINGS_KEY, Settings
from outsize.runtime.parameter_server.step_argument import argument_for, check_argument
from outsize.runtime.parameter_server.step_queue import StepFuture, StepQueue

__all__ = ["MAX_IGNORED_SERVER_ERRORS", "Coordinator"]

MAX_IGNORED_SERVER_ERRORS = 2
"""So many steps may lose a server that turns out to be alive, before one counts as an error."""


class Coordinator:
    """Runs a parameter-server job; it does not train itself.

    ::

        with Coordinator("job", settings) as coordinator:
            ... start servers and workers with coordinator.membership ...
            coordinator.initialise(lambda shard: torch.zeros(shard.shape))
            for batch in range(100):
                coordinator.schedule("train", {"batch": batch})
            coordinator.join()
            coordinator.save(folder)
    """

    def __init__(
        self,
        job: str,
        settings: Settings,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        own_address: str | None = None,
        step_timeout_s: float = 3600.0,
        worker_timeout_s: float = 3600.0,
        max_queued: int = 262_144,
    ) -> None:
        """Start the store and accept workers; ``own_address`` where ``address`` is only a name of this one.

        ``step_timeout_s`` bounds one step on one worker; ``worker_timeout_s`` how long the job waits without
        any worker.
        """
        self._settings = settings
        self._step_timeout_s, self._worker_timeout_s = step_timeout_s, worker_timeout_s
        self._store, self.membership = host_store(job, address, port, own_address)
        self._queue = StepQueue(max_queued)
        self._next_push_id = 0
        self._epoch = 0  # a worker connects to the servers anew when it changes
        self._workers: dict[int, Session] = {}
        self._running: dict[int, StepFuture] = {}
        self._is_stopped = False
        self._lock = threading.Lock()
        self._ignored: Counter[str] = Counter()
        self._alone: threading.Timer | None = None
        self._servers = ServerControl(self.membership, settings, self.abort)
        self._listener = Listener(self.membership, "coordinator", self._serve)
        self._accepting = threading.Thread(target=self._listener.run, daemon=True)
        self._accepting.start()
        self._note_workers()

    def initialise(self, initial: Callable[[Shard], torch.Tensor]) -> None:
        """Connect to the servers and give every shard its first values, asked for one shard at a time.

        Raises:
            LaunchError: a server did not start in time.
            ServerLostError: a server died.
        """
        self._servers.connect()
        self._servers.configure()
        self._servers.set_values(initial)
        self._admit_workers()

    def restore(self, folder: Path) -> int:
        """Load a checkpoint of any strategy into all servers, new ones included, and return its version.

        After a ``ServerLostError`` this waits for the successor of the lost server.

        Raises:
            PlanError: the checkpoint belongs to another model or optimizer.
            LaunchError: the checkpoint is incomplete, or a server did not start in time.
        """
        applied = read_info(folder).applied
        self._next_push_id = max(self._next_push_id, applied.watermark, *(one + 1 for one in applied.newer))
        self._servers.connect()
        self._servers.configure()
        version = self._servers.load(folder)
        self._queue.clear_error()
        self._admit_workers()
        return version

    def save(self, parent: Path, constants: Mapping[str, torch.Tensor] | None = None) -> Path:
        """Wait for all steps, write a checkpoint below ``parent``, and return its folder.

        ``constants`` are what a checkpoint of the model holds besides: frozen parameters and buffers. Pushes
        of an update that is not complete yet are no part of it.

        Raises:
            OutsizeError: a step failed, or a server was lost.
        """
        self._queue.join()
        return self._servers.save(parent, constants or {})

    def schedule(self, step: str, argument: Any = None) -> StepFuture:
        """Queue a step by the name under which the workers know it, with plain data as its argument.

        Raises:
            TrainingError: that is not a name, or not plain data.
            OutsizeError: an earlier step failed, or a server was lost.
        """
        if not isinstance(step, str):
            raise TrainingError(f"{step!r} is not the name of a step", attempt="register it on the workers")
        check_argument(argument)
        future = StepFuture(step, argument, self._next_push_id)
        self._next_push_id += 1
        self._queue.put(future)
        return future

    def join(self) -> None:
        """Wait for all steps.

        Raises:
            OutsizeError: a step failed, a server was lost, or no worker was there for too long.
        """
        self._queue.join()

    def abort(self, error: OutsizeError) -> None:
        """Cancel what is queued; whoever waits for steps gets this error, unless there was one before."""
        self._queue.abort(error)

    def is_done(self) -> bool:
        """Whether no step is queued or running; raises what ``join`` would."""
        return self._queue.is_done()

    def read_variable(self, name: str) -> torch.Tensor:
        """Return a whole variable as it is now."""
        return self._servers.read_variable(name)

    def statistics(self) -> list[dict[str, Any]]:
        """Return version, staleness histogram, and refused and repeated pushes of every server."""
        return self._servers.statistics()

    def stop(self) -> None:
        """Stop workers and servers, and wait for them to go; a second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._queue.close()
        self._listener.stop()
        self._accepting.join(STOP_TIMEOUT_S)
        self._listener.join(STOP_TIMEOUT_S)
        self._servers.stop()
        with self._lock:
            if self._alone is not None:
                self._alone.cancel()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _admit_workers(self) -> None:
        self._ignored.clear()
        self._epoch += 1
        self._store.set(SETTINGS_KEY, json.dumps(self._settings.to_json()))

    def _serve(self, session: Session, worker: int) -> None:
        """Feed one worker until it is lost, replaced or no longer needed."""
        session.timeout_s = self._step_timeout_s
        with self._lock:
            replaced = self._workers.get(worker)
            self._workers[worker] = session
            self._note_workers()
            abandoned = self._running.pop(worker, None) if replaced is not None else None
        if abandoned is not None:
            self._queue.put_back(abandoned)  # the replaced worker may be frozen: its answer counts no more
        while self._run_one(session, worker):
            pass
        with self._lock:
            if self._workers.get(worker) is session:
                del self._workers[worker]
            self._note_workers()

    def _run_one(self, session: Session, worker: int) -> bool:
        """Run the next step on a worker; return whether the worker can go on."""
        future = self._queue.take()
        if future is None:
            with suppress(PeerLostError):
                session.send(Message(Kind.STOP))
            return False
        if not self._start(session, worker, future):
            self._queue.put_back(future)
            return False
        try:
            answer = session.ask(self._request(future, worker))
        except PeerLostError:
            if self._end(session, worker):
                self._queue.put_back(future)
            return False
        if self._end(session, worker):
            self._settle(future, answer, worker)
            return True
        return False

    def _start(self, session: Session, worker: int, future: StepFuture) -> bool:
        """Note what a worker runs, unless it has been replaced."""
        with self._lock:
            if self._workers.get(worker) is session:
                self._running[worker] = future
                return True
            return False

    def _end(self, session: Session, worker: int) -> bool:
        """Note that a worker's step ended; False if it was replaced, and its step given to another."""
        with self._lock:
            if self._workers.get(worker) is session:
                del self._running[worker]
                return True
            return False

    def _request(self, future: StepFuture, worker: int) -> Message:
        data = [future.step, argument_for(future.argument, worker)]
        return Message(Kind.RUN_STEP, [future.push_id, self._epoch], data=data)

    def _settle(self, future: StepFuture, answer: Message, worker: int) -> None:
        if answer.kind == Kind.DONE:
            self._queue.succeed(future, answer.data)
        elif answer.kind == Kind.SERVER_LOST:
            self._settle_server_error(future, *answer.data)
        else:
            failed = error_of(answer) or StepFailedError(future.step, worker, str(answer.data))
            self._queue.fail(future, failed)

    def _settle_server_error(self, future: StepFuture, server: str, reason: str) -> None:
        """Forgive a worker that lost a server which still answers, but not for ever."""
        error = ServerLostError(server, reason)
        if not self._servers.answers(error.index):
            self._queue.fail(future, error)
            return
        self._ignored[server] += 1
        if self._ignored[server] <= MAX_IGNORED_SERVER_ERRORS:
            self._queue.put_back(future)
        else:
            self._queue.fail(future, error)

    def _note_workers(self) -> None:
        """Start or stop the clock that ends a job without workers."""
        if self._workers and self._alone is not None:
            self._alone.cancel()
            self._alone = None
        elif not self._workers and self._alone is None:
            reason = TrainingError(
                f"no worker was there for {self._worker_timeout_s:g} s",
                attempt="start a worker; then schedule the steps again",
            )
            self._alone = threading.Timer(self._worker_timeout_s, self._queue.abort, [reason])
            self._alone.daemon = True
            self._alone.start()
