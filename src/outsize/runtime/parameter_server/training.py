"""The coordinator's side of a training job: schedules steps, notes what came of them, saves and evaluates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
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


@dataclass(slots=True)
class JobSummary:
    """What a job achieved."""

    losses: list[float] = field(default_factory=list)  # by update
    training_time_s: float = 0.0  # without evaluations and checkpoints
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    num_tokens: int = 0
    peak_memory_bytes: dict[int, int | None] = field(default_factory=dict)  # by worker
    staleness: dict[int, int] = field(default_factory=dict)  # applied pushes by age, on server 0

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
        """Mean time between updates."""
        return self.training_time_s / len(self.losses) if self.losses else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all updates over the time they took."""
        return self.num_tokens / self.training_time_s if self.training_time_s else 0.0


@dataclass(slots=True)
class ServerTraining:
    """Runs the updates of a job on a coordinator whose servers hold their values."""

    coordinator: Coordinator
    job: ParameterServerJob
    constants: dict[str, torch.Tensor]
    show_progress: bool = True

    def train(self, version: int) -> JobSummary:
        """Go on from an update until the job's steps are done; checkpoint and evaluate on the way.

        Raises:
            OutsizeError: a step failed, a server was lost, or no worker is left.
        """
        summary = JobSummary()
        metrics = MetricsFile(Path(self.job.run_directory) / "metrics.jsonl")
        last = self.job.num_steps // self.job.updates.steps_per_update
        with self._progress(version, last) as advance:
            self._evaluate(version, summary, metrics)
            while version < last:
                until = self._next_stop(version, last)
                started = time.perf_counter()
                for done in self._updates(version, until):
                    self._note(done, summary, metrics)
                    advance(done)
                summary.training_time_s += time.perf_counter() - started
                version = until
                if version == last or self._is_due(version, self.job.evaluate_every):
                    self._evaluate(version, summary, metrics)
                if version == last or self._is_due(version, self.job.checkpoint_every):
                    self.save()
        summary.staleness = self.coordinator.statistics()[0]["staleness"]
        return summary

    def save(self) -> None:
        """Write a checkpoint of all that training needs."""
        self.coordinator.save(Path(self.job.run_directory) / "checkpoints", self.constants)

    def _next_stop(self, version: int, last: int) -> int:
        """Return the next version after which something is saved or evaluated."""
        per_update = self.job.updates.steps_per_update
        every = [steps // per_update for steps in (self.job.evaluate_every, self.job.checkpoint_every)]
        return min([last, *((version // one + 1) * one for one in every if one)])

    def _is_due(self, version: int, every: int) -> bool:
        per_update = self.job.updates.steps_per_update
        return bool(every) and version % max(1, every // per_update) == 0

    def _updates(self, first: int, end: int) -> Iterator[UpdateMetrics]:
        """Run updates and yield what came of each.

        Where an update must be the whole global batch's, it is complete before the next is scheduled, so that
        whoever is free may do any of its parts. Else workers are kept busy.
        """
        num_parts = self.job.updates.num_parts(self.job.num_workers)
        futures: dict[int, list[StepFuture]] = {}
        for update in range(first, end):
            futures[update] = [
                self.coordinator.schedule("train", {"update": update, "part": part})
                for part in range(num_parts)
            ]
            if self.job.updates.are_exact:
                yield self._finished(update, futures.pop(update))
        for update, parts in futures.items():
            yield self._finished(update, parts)
        self.coordinator.join()

    def _finished(self, update: int, parts: list[StepFuture]) -> UpdateMetrics:
        results = [self._result(future) for future in parts]
        steps = self.job.updates.steps_per_update
        return UpdateMetrics(
            step=(update + 1) * steps,
            loss=sum(result["loss"] for result in results),
            num_tokens=results[0]["num_tokens"],
            step_time_s=max(result["step_time_s"] for result in results),
            workers=[result["worker"] for result in results],
            peak_memory_bytes=[result["peak_memory_bytes"] for result in results],
        )

    def _result(self, future: StepFuture) -> Any:
        try:
            return future.result()
        except OutsizeError:
            self.coordinator.join()  # raises the first error, of which this may be a consequence
            raise

    def _note(self, done: UpdateMetrics, summary: JobSummary, metrics: MetricsFile) -> None:
        summary.losses.append(done.loss)
        summary.num_tokens += done.num_tokens
        for worker, peak in zip(done.workers, done.peak_memory_bytes, strict=True):
            summary.peak_memory_bytes[worker] = peak
        metrics.write(done)

    def _evaluate(self, version: int, summary: JobSummary, metrics: MetricsFile) -> None:
        """Let workers evaluate: each batch exactly once, also when one dies."""
        if not self.job.num_validation_batches:
            return
        futures = [
            self.coordinator.schedule("evaluate", {"index": index})
            for index in range(self.job.num_validation_batches)
        ]
        step = version * self.job.updates.steps_per_update
        loss = statistics.fmean(self._result(future) for future in futures)
        summary.validation_losses.append((step, loss))
        metrics.write(EvaluationMetrics(step, loss))

    @contextmanager
    def _progress(self, version: int, last: int) -> Iterator[Any]:
        if not self.show_progress:
            yield lambda _: None
            return
        columns = ("training", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        with Progress(*columns, TimeRemainingColumn()) as progress:
            task = progress.add_task("", total=last, completed=version, figures="")
            yield lambda done: progress.update(task, advance=1, figures=f"loss {done.loss:.4f}")
