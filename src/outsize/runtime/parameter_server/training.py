"""The coordinator's side of a training job: schedules updates, notes what came of them, saves, evaluates."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outsize.errors import OutsizeError
from outsize.runtime.metrics import EvaluationMetrics, MetricsFile, UpdateMetrics
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.step_queue import StepFuture

__all__ = ["JobSummary", "ServerTraining"]

_UPDATES_AHEAD = 2  # for each worker: enough to keep it busy, few enough to see results as they come


@dataclass(slots=True)
class JobSummary:
    """What a job achieved, from ``first_step`` on."""

    first_step: int = 0
    steps_per_update: int = 1
    peak_memory_by_rank: list[int | None] = field(default_factory=list)  # by worker
    losses: list[float] = field(default_factory=list)  # by update
    training_time_s: float = 0.0  # without evaluations and checkpoints
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    num_tokens: int = 0
    staleness: dict[int, int] = field(default_factory=dict)  # applied pushes by age, on server 0

    @property
    def num_steps(self) -> int:
        """Steps done, those before this run included."""
        return self.first_step + len(self.losses) * self.steps_per_update

    @property
    def first_loss(self) -> float:
        """Training loss of the first update."""
        return self.losses[0] if self.losses else float("nan")

    @property
    def last_loss(self) -> float:
        """Training loss of the last update."""
        return self.losses[-1] if self.losses else float("nan")

    @property
    def step_time_s(self) -> float:
        """Mean time of a step."""
        num_steps = self.num_steps - self.first_step
        return self.training_time_s / num_steps if num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all updates over the time they took."""
        return self.num_tokens / self.training_time_s if self.training_time_s else 0.0


@dataclass(slots=True)
class ServerTraining:
    """Runs the updates of a job on a coordinator whose servers hold their values."""

    coordinator: Coordinator
    job: ParameterServerJob
    constants: Mapping[str, torch.Tensor]

    def train(self, version: int) -> JobSummary:
        """Go on from an update until the job's steps are done; checkpoint and evaluate on the way.

        Raises:
            OutsizeError: a step failed, a server was lost, or no worker is left.
        """
        job, per_update = self.job, self.job.updates.steps_per_update
        summary = JobSummary(version * per_update, per_update, [None] * job.num_workers)
        metrics = MetricsFile(Path(job.run_directory) / "metrics.jsonl")
        last = job.num_steps // per_update
        evaluate_every, save_every = job.evaluate_every // per_update, job.checkpoint_every // per_update
        with self._progress(version, last) as advance:
            self._evaluate(summary, metrics)
            while version < last:
                stop = min(_next_stop(version, every, last) for every in (evaluate_every, save_every))
                started, time_before_s = time.perf_counter(), summary.training_time_s
                for done in self._updates(version, stop):
                    summary.training_time_s = time_before_s + time.perf_counter() - started
                    advance(self._note(done, summary, metrics))
                version = stop
                if version == _next_stop(version - 1, evaluate_every, last):
                    self._evaluate(summary, metrics)
                if job.write_checkpoint and version == _next_stop(version - 1, save_every, last):
                    self.coordinator.save(Path(job.run_directory) / "checkpoints", self.constants)
        summary.staleness = self.coordinator.statistics()[0]["staleness"]
        return summary

    def _updates(self, first: int, end: int) -> Iterator[list[dict[str, Any]]]:
        """Run updates and yield what the parts of each say, in order.

        Where an update must be the whole global batch's, it is complete before the next is scheduled, so that
        whoever is free may do any of its parts. Else workers are kept busy.
        """
        job = self.job
        ahead = 0 if job.updates.are_exact else _UPDATES_AHEAD * job.num_workers // job.num_parts
        scheduled: deque[list[StepFuture]] = deque()
        for update in range(first, end):
            parts = [{"update": update, "part": part} for part in range(job.num_parts)]
            scheduled.append([self.coordinator.schedule("train", argument) for argument in parts])
            if len(scheduled) > ahead:
                yield [self._result(future) for future in scheduled.popleft()]
        for futures in scheduled:
            yield [self._result(future) for future in futures]
        self.coordinator.join()

    def _result(self, future: StepFuture) -> Any:
        try:
            return future.result()
        except OutsizeError:
            self.coordinator.join()  # raises the first error, of which this may be a consequence
            raise

    def _note(self, parts: list[dict[str, Any]], summary: JobSummary, metrics: MetricsFile) -> UpdateMetrics:
        """Add what the parts of an update say to the summary and to the metrics."""
        summary.losses.append(sum(part["loss"] for part in parts))
        summary.num_tokens += parts[0]["num_tokens"]
        for part in parts:
            summary.peak_memory_by_rank[part["worker"]] = part["peak_memory_bytes"]
        done = UpdateMetrics(
            step=summary.num_steps,
            loss=summary.last_loss,
            num_tokens=summary.num_tokens,
            tokens_per_s=summary.tokens_per_s,
            step_time_s=max(part["step_time_s"] for part in parts) / summary.steps_per_update,
            workers=[part["worker"] for part in parts],
            peak_memory_bytes=[part["peak_memory_bytes"] for part in parts],
        )
        metrics.write(done)
        return done

    def _evaluate(self, summary: JobSummary, metrics: MetricsFile) -> None:
        """Let workers evaluate: each batch exactly once, also when one dies."""
        if not self.job.num_validation_batches:
            return
        futures = [
            self.coordinator.schedule("evaluate", {"index": index})
            for index in range(self.job.num_validation_batches)
        ]
        loss = statistics.fmean(self._result(future) for future in futures)
        summary.validation_losses.append((summary.num_steps, loss))
        metrics.write(EvaluationMetrics(summary.num_steps, loss))

    @contextmanager
    def _progress(self, version: int, last: int) -> Iterator[Any]:
        if not self.job.show_progress:
            yield lambda _: None
            return
        columns = ("training", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        with Progress(*columns, TimeRemainingColumn()) as progress:
            task = progress.add_task("", total=last, completed=version, figures="")
            yield lambda done: progress.update(
                task, advance=1, figures=f"loss {done.loss:.4f}  {done.tokens_per_s:,.0f} tokens/s"
            )


def _next_stop(version: int, every: int, last: int) -> int:
    """Return the first multiple of ``every`` after a version, but no later than the last."""
    return min(last, (version // every + 1) * every) if every else last
