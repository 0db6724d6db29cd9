"""Steps waiting for workers, by the rules of TensorFlow's coordinator: retry on loss, first error wins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from outsize.errors import TrainingError

__all__ = ["StepFuture", "StepQueue", "StepState"]


class StepState(Enum):
    """Where a step is on its way."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StepFuture:
    """A scheduled step. Its result is kept by the coordinator and outlives the worker that computed it."""

    def __init__(self, step: str, argument: Any, push_id: int) -> None:
        self.step, self.argument, self.push_id = step, argument, push_id
        self.state = StepState.QUEUED
        self._settled = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def result(self, timeout_s: float | None = None) -> Any:
        """Return what the step returned, waiting for it.

        Raises:
            TimeoutError: it is not settled in time.
            OutsizeError: it failed, or was cancelled because another step failed.
        """
        if not self._settled.wait(timeout_s):
            raise TimeoutError(f"step {self.step!r} is still {self.state.value}")
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, state: StepState, value: Any = None, error: BaseException | None = None) -> None:
        """Set the final state; for the queue alone."""
        self.state, self._value, self._error = state, value, error
        self._settled.set()


class StepQueue:
    """Hands steps to workers in order.

    The first error cancels everything queued; running steps end first, then ``put`` or ``join`` raises it,
    once. A step whose worker was lost goes back to the front.
    """

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._condition = threading.Condition()
        self._waiting: deque[StepFuture] = deque()
        self._num_running = 0
        self._error: BaseException | None = None
        self._is_closed = False

    def put(self, future: StepFuture) -> None:
        """Append a step, waiting while the queue is full.

        Raises:
            OutsizeError: an earlier step failed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._error or len(self._waiting) < self._max_queued)
            self._raise_error()
            self._waiting.append(future)
            self._condition.notify_all()

    def take(self) -> StepFuture | None:
        """Return the next step, waiting for one; None once the queue is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self._may_start())
            if self._is_closed:
                return None
            future = self._waiting.popleft()
            future.state = StepState.RUNNING
            self._num_running += 1
            self._condition.notify_all()  # there is room for another
            return future

    def put_back(self, future: StepFuture) -> None:
        """Return a step whose worker was lost, to be the next one taken."""
        with self._running_ends():
            if self._error is None:
                future.state = StepState.QUEUED
                self._waiting.appendleft(future)
            else:
                self._cancel(future)

    def succeed(self, future: StepFuture, value: Any) -> None:
        """Settle a running step with its result."""
        with self._running_ends():
            future.settle(StepState.DONE, value)

    def fail(self, future: StepFuture, error: BaseException) -> None:
        """Settle a running step with its error, and cancel what is queued."""
        with self._running_ends():
            future.settle(StepState.FAILED, error=error)
            self._stop_all(error)

    def abort(self, error: BaseException) -> None:
        """Cancel what is queued because of an error outside any step."""
        with self._condition:
            self._stop_all(error)
            self._condition.notify_all()

    def clear_error(self) -> None:
        """Forget an error that nobody has seen yet, because its cause is gone."""
        with self._condition:
            self._error = None
            self._condition.notify_all()

    def join(self) -> None:
        """Wait until no step is queued or running.

        Raises:
            OutsizeError: a step failed; the next ``join`` is clean.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._num_running and (self._error or not self._waiting))
            self._raise_error()

    def is_done(self) -> bool:
        """Whether nothing is queued or running; waits only while an error drains.

        Raises:
            OutsizeError: a step failed.
        """
        with self._condition:
            self._raise_error()
            return not self._waiting and not self._num_running

    def close(self) -> None:
        """Let every ``take`` return None."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _may_start(self) -> bool:
        return bool(self._waiting) and self._error is None

    @contextmanager
    def _running_ends(self) -> Iterator[None]:
        with self._condition:
            yield
            self._num_running -= 1
            self._condition.notify_all()

    def _stop_all(self, error: BaseException) -> None:
        self._error = self._error or error
        while self._waiting:
            self._cancel(self._waiting.popleft())

    def _cancel(self, future: StepFuture) -> None:
        why = f"another failed: {self._error}"
        future.settle(
            StepState.CANCELLED, error=TrainingError(f"step {future.step!r} was cancelled", why=why)
        )

    def _raise_error(self) -> None:
        if self._error is not None:
            self._condition.wait_for(lambda: not self._num_running)
            error, self._error = self._error, None
            self._condition.notify_all()
            raise error
