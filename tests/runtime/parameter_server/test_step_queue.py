"""The coordinator's rules, with workers played by threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from outsize.errors import OutsizeError, TrainingError
from outsize.runtime.parameter_server.step_argument import PerWorker, argument_for, check_argument
from outsize.runtime.parameter_server.step_queue import StepFuture, StepQueue, StepState


def _work(queue: StepQueue, run: Callable[[StepFuture], None], num_workers: int) -> list[threading.Thread]:
    def loop() -> None:
        while (future := queue.take()) is not None:
            run(future)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    return threads


def test_the_first_error_wins_and_cancels_the_rest() -> None:
    """12 steps, all from the fourth fail, 2 workers: 3 done, 2 failed, 7 cancelled, as TensorFlow does."""
    queue = StepQueue(100)
    futures = [StepFuture("step", number, number) for number in range(12)]
    both_failing = threading.Barrier(2)

    def run(future: StepFuture) -> None:
        if future.argument < 3:
            queue.succeed(future, future.argument)
        else:
            both_failing.wait(10)
            queue.fail(future, TrainingError(f"step {future.argument} is broken"))

    for future in futures:
        queue.put(future)
    threads = _work(queue, run, 2)
    with pytest.raises(TrainingError, match="is broken"):
        queue.join()
    assert Counter(future.state for future in futures) == {
        StepState.DONE: 3,
        StepState.FAILED: 2,
        StepState.CANCELLED: 7,
    }
    queue.join()  # the error was told once
    assert queue.is_done()
    with pytest.raises(OutsizeError, match="cancelled"):
        futures[-1].result()
    queue.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_nothing_runs_any_more_when_the_error_is_raised() -> None:
    """``put`` waits for the running step before it raises another one's error."""
    queue = StepQueue(100)
    slow, broken = StepFuture("slow", None, 0), StepFuture("broken", None, 1)
    queue.put(slow)
    queue.put(broken)
    assert [queue.take(), queue.take()] == [slow, broken]
    queue.fail(broken, TrainingError("broken"))
    threading.Timer(0.1, queue.succeed, [slow, "late"]).start()
    with pytest.raises(TrainingError):
        queue.put(StepFuture("next", None, 2))
    assert slow.state is StepState.DONE


def test_a_step_whose_worker_was_lost_comes_next() -> None:
    """It goes back to the front of the queue."""
    queue = StepQueue(100)
    first, second = StepFuture("first", None, 0), StepFuture("second", None, 1)
    queue.put(first)
    queue.put(second)
    taken = queue.take()
    assert taken is first
    queue.put_back(taken)
    assert queue.take() is first


def test_a_full_queue_blocks_the_coordinator() -> None:
    """The second step waits until the first one is taken."""
    queue = StepQueue(1)
    queue.put(StepFuture("first", None, 0))
    second = threading.Thread(target=queue.put, args=[StepFuture("second", None, 1)], daemon=True)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert queue.take() is not None
    second.join(5)
    assert not second.is_alive()


def test_arguments_are_plain_data_with_values_per_worker() -> None:
    """A value is chosen by worker index, also deep inside; futures and objects are refused."""
    argument = {"rows": [PerWorker(["a", "b"]), 3]}
    check_argument(argument)
    assert argument_for(argument, 1) == {"rows": ["b", 3]}
    with pytest.raises(TrainingError, match="fetch its result first"):
        check_argument([StepFuture("step", None, 0)])
    with pytest.raises(TrainingError, match="plain data"):
        check_argument({"object": object()})
