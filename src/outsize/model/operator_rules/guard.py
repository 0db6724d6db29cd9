"""Run trials in a forked process, because an operator on shards that do not fit it may crash the process.

The child announces every step before it takes it and sends what it finds at once. When it dies, the step it
announced last is the culprit: a new child goes on with the next one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["Attempt", "Task", "run_guarded"]

Attempt = Callable[[int], bool]  # call it before step n (0, 1, ...): False where the step is to be left out
Task = Callable[[Attempt], Iterator[Any]]


@dataclass(slots=True)
class _Progress:
    """What is known of the tasks: results so far, the task at work, and its last step announced."""

    results: list[list[Any]]
    task: int = 0
    step: int = -1


def run_guarded(tasks: Sequence[Task], timeout_s: float = 20.0) -> list[list[Any]]:
    """Return what every task yields, run in forked processes.

    A task that crashes before its first step yields nothing; a step that neither ends nor yields within
    ``timeout_s`` counts as crashed.
    """
    progress = _Progress([[] for _ in tasks])
    while progress.task < len(tasks):
        before = (progress.task, progress.step)
        if _run_child(tasks, progress, timeout_s):
            break
        if before == (progress.task, progress.step):  # crashed outside any new step: give the task up
            progress.task, progress.step = progress.task + 1, -1
    return progress.results


def _run_child(tasks: Sequence[Task], progress: _Progress, timeout_s: float) -> bool:
    """Go on with the tasks in a child until it ends (True) or dies (False)."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _work(tasks, progress, writer)
    writer.close()
    try:
        while reader.poll(timeout_s):
            kind, task, content = reader.recv()
            if kind == "end":
                return True
            if kind == "step":
                progress.task, progress.step = task, content
            else:
                progress.results[task].append(content)
    except EOFError:
        pass  # the child died: its last announcement tells where
    finally:
        reader.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return False


def _work(tasks: Sequence[Task], progress: _Progress, writer: Connection) -> None:
    """Run in the child: send ("step", task, n) before each step, ("found", task, item) for each item."""
    try:
        faulthandler.disable()  # a crash here is a finding, not news
        torch.set_num_threads(1)
        for index in range(progress.task, len(tasks)):
            done = progress.step if index == progress.task else -1

            def attempt(step: int, index: int = index, done: int = done) -> bool:
                if step <= done:
                    return False
                writer.send(("step", index, step))
                return True

            if index > progress.task:
                writer.send(("step", index, -1))
            for item in tasks[index](attempt):
                writer.send(("found", index, item))
        writer.send(("end", len(tasks), None))
    finally:
        os._exit(0)  # nothing of the parent's clean-up
