"""Trains a model whole in one process and split over ranks, in float64, and compares what can be compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coverage_families import Family
from outsize.model.batch_entries import flatten_batch
from outsize.model.operator_rules.placement import Shard
from outsize.model.operator_rules.shards import shard_of
from outsize.model.program import Program
from outsize.model.record import loss_tensor, record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule
from outsize.plan.sharding import Sharding
from outsize.planner.sharding import plan_sharding
from outsize.planner.sharding_costs import ShardingCosts
from outsize.planner.sharding_overrides import ShardingOverrides
from outsize.runtime.collectives import set_axis_group
from outsize.runtime.tensor_parallel import lower, parameter_placements

__all__ = ["MEMORY", "TIME", "WholeRun", "run_whole", "worst_difference"]

NUM_STEPS = 5
Values = dict[str, torch.Tensor]

# No latency: tiny models are split as large ones are. With MEMORY, holding a byte costs more than moving
# it, so that everything is split that can be; with TIME it hardly counts.
MEMORY = {"link_latency_s": 0.0, "held_activation_s_per_byte": 1e-9}
TIME = {"link_latency_s": 0.0, "held_parameter_s_per_byte": 1e-11, "flops_per_s": 1e12}


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A model in one process: the split to hold against it, and what it was, gave and became."""

    name: str
    sharding: Sharding
    initial: Values
    losses: list[float]
    gradients: Values  # of the first step
    trained: Values  # parameters and buffers after all steps


def run_whole(
    family: Family, degree: int, costs: dict[str, float], overrides: ShardingOverrides | None = None
) -> WholeRun:
    """Plan the split of a model and train it whole.

    Raises:
        RecordingError: it cannot be recorded as operators.
        PlanError: nothing in it can be split.
    """
    module, program, entries = _build(family)
    sharding = plan_sharding(program, degree, costs=ShardingCosts(degree, **costs), overrides=overrides)
    initial = _copies(dict(module.named_parameters()))
    losses, gradients = _train(program, module, entries)
    return WholeRun(family.name, sharding, initial, losses, gradients, _copies(_state(module)))


def worst_difference(rank: int, family: Family, whole: WholeRun) -> tuple[float, str]:
    """Train one rank's part of a split; return how far anything is from one process, and what that is.

    Compared are losses, gradients, trained parameters and buffers, absolutely below 1 and relatively above.
    Parameters that are whole on every rank must be equal on all to the last bit.
    """
    set_axis_group("tp", dist.group.WORLD, seed=0)
    placements = parameter_placements(whole.sharding)
    module, program, entries = _build(family)
    for name, parameter in module.named_parameters():
        parameter.data = _held(name, whole.initial[name], placements, rank)
    losses, gradients = _train(lower(program, whole.sharding, rank=rank), module, entries)
    pairs = {
        "the losses": (torch.tensor(losses), torch.tensor(whole.losses)),
        **_paired(gradients, whole.gradients, placements, rank, "the gradient of "),
        **_paired(_state(module), whole.trained, placements, rank, ""),
        **_against_first_rank(_state(module), placements),
    }
    return max((_difference(*pair), name) for name, pair in pairs.items())


def _build(family: Family) -> tuple[nn.Module, Program, Values]:
    module, batch = family.build().double(), family.batch()
    program = _in_double(record_module(module, batch, granularity="operators"))
    return module, program, flatten_batch(batch)[0]


def _in_double(program: Program) -> Program:
    """Make constants, and casts to float32, in which models compute norms and losses, those of float64."""

    def changed(item: Any) -> Any:
        return torch.float64 if item is torch.float32 else item

    nodes = [replace(node, arguments=tuple(map(changed, node.arguments))) for node in program.nodes]
    constants = {n: v.double() if v.is_floating_point() else v for n, v in program.constants.items()}
    return replace(program, nodes=nodes, constants=constants)


def _train(program: Program, module: nn.Module, entries: Values) -> tuple[list[float], Values]:
    stage = StageModule(program, slice_program(program, [])[0], module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    losses: list[float] = []
    first: Values = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_tensor(stage(**{name: entries[name] for name in stage.part.batch_entries}))
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            first = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, first


def _state(module: nn.Module) -> Values:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _copies(values: Values) -> Values:
    return {name: value.detach().clone() for name, value in values.items()}


def _held(name: str, whole: torch.Tensor, placements: dict[str, Shard], rank: int) -> torch.Tensor:
    if name not in placements:
        return whole.clone()  # what came from another process is shared memory
    return shard_of(whole, placements[name], dist.get_world_size(), rank).clone()


def _paired(
    found: Values, whole: Values, placements: dict[str, Shard], rank: int, prefix: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    assert found.keys() == whole.keys(), found.keys() ^ whole.keys()
    return {
        f"{prefix}{name} ({placements.get(name, 'whole')})": (
            value.detach(),
            _held(name, whole[name], placements, rank),
        )
        for name, value in found.items()
    }


def _against_first_rank(
    state: Values, placements: dict[str, Shard]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return, of what is not equal to the first rank's to the last bit, a pair that is far apart."""
    found = {}
    for name, value in state.items():
        if name not in placements:
            first = value.detach().clone()
            dist.broadcast(first, 0)
            if not torch.equal(first, value):
                found[f"{name} on rank {dist.get_rank()}, unlike the first rank's"] = (
                    torch.zeros(()),
                    torch.ones(()),
                )
    return found


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.shape != right.shape:
        return float("inf")
    if left.numel() == 0:
        return 0.0
    left, right = left.double(), right.double()
    return float(((left - right).abs() / right.abs().clamp_min(1.0)).nan_to_num(nan=torch.inf).max())
