"""A thin training loop over :class:`ParallelModel`: steps, evaluation, metrics, progress, checkpoint."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outsize.runtime.batch_source import BatchSource
from outsize.runtime.metrics import EvaluationMetrics, MetricsFile, StepMetrics
from outsize.runtime.parallel_model import ParallelModel

__all__ = ["Trainer", "TrainingSummary", "count_tokens", "gather_from_all"]


@dataclass(slots=True)
class TrainingSummary:
    """What a run achieved; the same on every process."""

    losses: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def step_time_s(self) -> float:
        """Median time of a step, without the first, which connects and allocates."""
        return statistics.median(self.step_times_s[1:] or self.step_times_s or [0.0])

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one step over its median time."""
        steps = len(self.step_times_s)
        return self.num_tokens / steps / self.step_time_s if steps and self.step_time_s else 0.0


@dataclass(slots=True)
class Trainer:
    """Trains ``model`` on ``batches``; rank 0 writes ``metrics.jsonl`` and shows progress."""

    model: ParallelModel
    batches: BatchSource
    run_directory: Path
    evaluate_every: int = 0  # steps; 0: only before the first step and after the last
    num_validation_batches: int = 0
    show_progress: bool = True

    def train(self, num_steps: int) -> TrainingSummary:
        """Run steps until the model has done ``num_steps`` in all."""
        summary = TrainingSummary()
        is_first = self.model.mesh.rank == 0
        metrics = MetricsFile(self.run_directory / "metrics.jsonl" if is_first else None)
        with self._progress(num_steps) as advance:
            self._evaluate(summary, metrics)
            while self.model.num_steps < num_steps:
                step = self._step(summary)
                metrics.write(step)
                advance(step)
                done = self.model.num_steps
                if done == num_steps or (self.evaluate_every and done % self.evaluate_every == 0):
                    self._evaluate(summary, metrics)
        return summary

    def _step(self, summary: TrainingSummary) -> StepMetrics:
        batch = self.batches.training_batch(self.model.num_steps, self.model.plan.global_batch)
        started = time.perf_counter()
        result = self.model.train_step(batch)
        elapsed_s = time.perf_counter() - started
        num_tokens = count_tokens(batch)
        summary.losses.append(result.loss)
        summary.step_times_s.append(elapsed_s)
        summary.num_tokens += num_tokens
        return StepMetrics(
            step=self.model.num_steps,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            num_tokens=summary.num_tokens,
            tokens_per_s=num_tokens / elapsed_s,
            step_time_s=elapsed_s,
            peak_memory_bytes=gather_from_all(self.model.memory.measure_peak_bytes()),
        )

    def _evaluate(self, summary: TrainingSummary, metrics: MetricsFile) -> None:
        if not self.num_validation_batches:
            return
        global_batch = self.model.plan.global_batch
        losses = [
            self.model.evaluate(self.batches.validation_batch(index, global_batch))
            for index in range(self.num_validation_batches)
        ]
        loss = statistics.fmean(losses)
        summary.validation_losses.append((self.model.num_steps, loss))
        metrics.write(EvaluationMetrics(self.model.num_steps, loss))

    @contextmanager
    def _progress(self, num_steps: int) -> Iterator[Any]:
        if not self.show_progress or self.model.mesh.rank != 0:
            yield lambda _: None
            return
        columns = ("training", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        with Progress(*columns, TimeRemainingColumn()) as progress:
            task = progress.add_task("", total=num_steps, completed=self.model.num_steps, figures="")
            yield lambda step: progress.update(
                task, completed=step.step, figures=f"loss {step.loss:.4f}  {step.tokens_per_s:,.0f} tokens/s"
            )


def count_tokens(batch: Any) -> int:
    """Return the tokens in a batch: the elements of ``input_ids``, else its samples."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        return int(batch["input_ids"].numel())
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return next((int(leaf.shape[0]) for leaf in leaves if leaf.dim()), 1)


def gather_from_all(value: int | None) -> list[int | None]:
    """Return the value of every rank, in order."""
    if not dist.is_initialized():
        return [value]
    mine = torch.tensor([-1 if value is None else value], dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [None if each.item() < 0 else int(each.item()) for each in gathered]
