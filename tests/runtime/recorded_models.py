"""Models for runs on real processes, by name, and what to compare of a run with one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coverage_families import FAMILIES
from helpers.modules import Casting, DoubledGradient
from outsize.model.source import resize_batch
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

__all__ = ["Case", "Outcome", "build", "make_batch", "make_plan", "run_case"]

X = torch.linspace(-1, 1, 4 * 8, dtype=torch.float64).view(4, 8)


class LongSkip(nn.Module):
    """What the first block makes is needed again by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.last = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = hidden = self.first(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden + skipped).square().mean()


class MixedDtypes(nn.Module):
    """Another dtype in every block; the loss is in that of the last."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Casting(dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class LonelyEnds(nn.Module):
    """A table and an activation, two layers, a head: each may be a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.activation = nn.Tanh()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.activation(self.embedding(ids)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class ManyKinds(nn.Module):
    """Sends floats, complex numbers, integers and booleans, and calls a custom function in between."""

    def __init__(self) -> None:
        super().__init__()
        self.angle, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = self.angle(x)
        turned = torch.polar(torch.ones_like(x), angle)
        order, positive = angle.argsort(dim=1), angle.detach() > 0
        y = self.out(DoubledGradient.apply(angle))
        return ((turned * y).real.gather(1, order) * positive).mean()


class Adapted(nn.Module):
    """Frozen layers with a low-rank adapter each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedLayer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class AdaptedLayer(nn.Module):
    """Frozen weights and a trained product of two thin matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


class SharedSum(nn.Module):
    """Two blocks with one weight of 200 elements, whose gradient is 1 for each use."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10, 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight.sum()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SharedSum.Block() for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def token_ids(seed: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Any, Any]] = {
    "long_skip": (LongSkip, (X,)),
    "mixed_dtypes": (partial(MixedDtypes, torch.float64, torch.float32, torch.bfloat16, torch.float64), (X,)),
    "bfloat16": (partial(MixedDtypes, torch.bfloat16, torch.bfloat16), (X,)),
    "lonely_ends": (LonelyEnds, {"ids": token_ids(0), "labels": token_ids(1)}),
    "many_kinds": (ManyKinds, (X,)),
    "adapted": (Adapted, (X,)),
    "shared_sum": (SharedSum, (X,)),
}


def build(name: str) -> nn.Module:
    """Return a model of this module or a family by name, in float64."""
    family = FAMILIES["lstm"] if name in MODELS else FAMILIES[name]
    return (replace(family, factory=MODELS[name][0]) if name in MODELS else family).build()


def make_batch(name: str) -> Any:
    """Return a model's batch of four samples."""
    return MODELS[name][1] if name in MODELS else FAMILIES[name].batch()


@dataclass(frozen=True)
class Case:
    """A model, where it is cut, and how it runs."""

    name: str
    cuts: tuple[str, ...]
    num_microbatches: int = 2
    schedule: str = "1f1b"
    recompute: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank has after the gradients of one batch."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    sent_bytes: dict[int, int]  # by the rank that receives them


def make_plan(case: Case, num_ranks: int) -> Plan:
    """Return a pipeline plan for a case."""
    stages = [
        StageSpec(index, label, recompute=(label,) if case.recompute and index else ())
        for index, label in enumerate(("", *case.cuts))
    ]
    schedule = ScheduleSpec(case.schedule, case.num_microbatches, len(stages) // num_ranks)
    optimizer = OptimizerSpec("sgd", learning_rate=0.1)
    mesh = Mesh(pp=num_ranks)
    return Plan("pipeline_parallel", mesh, tuple(stages), schedule, 4, optimizer=optimizer)


def run_case(case: Case) -> Outcome:
    """Compute the gradients of the case's batch; then train two steps, which must come to an end."""
    batch = make_batch(case.name)
    plan = make_plan(case, dist.get_world_size())
    model = parallelize(
        partial(build, case.name), plan, sample_batch=resize_batch(batch, plan.microbatch_size)
    )
    model.compute_gradients(batch)  # connects, for which torch sends four bytes
    with counted_sends() as sent_bytes:
        result = model.compute_gradients(batch)
    gradients = {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}
    for _ in range(2):
        model.train_step(batch)
    return Outcome(result.loss, result.gradient_norm, gradients, dict(sent_bytes))


@contextmanager
def counted_sends() -> Iterator[dict[int, int]]:
    """Count the bytes of every point-to-point send of this process, by receiving rank of its group."""
    sent: dict[int, int] = defaultdict(int)
    original = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[kwargs["group_dst"]] += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    dist.isend = dist.distributed_c10d.isend = isend
    try:
        yield sent
    finally:
        dist.isend = dist.distributed_c10d.isend = original
