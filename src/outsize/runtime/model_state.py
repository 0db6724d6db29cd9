"""The state of a training run by full names: parameters, persistent buffers, and the optimizer's moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from outsize.model.operator_rules.placement import Shard
from outsize.runtime.checkpoint_entry import CheckpointEntry, rows_entry, sharded_entry, whole_entry
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.state_sharding import StateSharding

__all__ = ["initialise_optimizer_state", "persistent_buffers", "state_entries"]


def state_entries(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    placements: Mapping[str, Shard],
    sharding: StateSharding,
    mesh: ProcessMesh,
) -> dict[str, CheckpointEntry]:
    """Return an entry for everything this process holds; moments are named ``optimizer/<name>/<moment>``."""

    def entry(name: str, tensor: torch.Tensor, like: torch.Tensor) -> CheckpointEntry:
        if tensor.shape != like.shape:
            return whole_entry(tensor)
        degree, rank = mesh.mesh.tp, mesh.coordinates["tp"]
        if sharding.is_sharded:
            shape = sharding.shape(name)
            rows = sharding.shards.rows(shape, sharding.shards.rank)
            return rows_entry(tensor, rows, shape, placements.get(name), degree, rank)
        if name in placements:
            return sharded_entry(tensor, placements[name], degree, rank)
        return whole_entry(tensor)

    entries = {name: entry(name, parameter, parameter) for name, parameter in parameters.items()}
    entries |= {name: whole_entry(buffer) for name, buffer in buffers.items()}
    for name, parameter in parameters.items():
        for key, moment in optimizer.state.get(parameter, {}).items():
            if isinstance(moment, torch.Tensor):
                entries[f"optimizer/{name}/{key}"] = entry(name, moment, parameter)
    return entries


def persistent_buffers(module: nn.Module, held: set[str]) -> dict[str, torch.Tensor]:
    """Return the buffers among ``held`` names that a state dict of ``module`` would have."""
    return {
        name: buffer
        for name, buffer in _persistent(module)
        if name in held and buffer is not None and not buffer.is_meta
    }


def _persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for path, part in module.named_modules():
        for leaf, buffer in part._buffers.items():
            if leaf not in part._non_persistent_buffers_set:
                yield (f"{path}.{leaf}" if path else leaf), buffer


def initialise_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], saved_names: set[str]
) -> None:
    """Make the moments that a checkpoint has, as the optimizer's first step would, to load them into.

    Optimizers of torch make them in ``step``; with zero gradients and a learning rate of zero it does
    nothing else. A parameter that had no gradient when the checkpoint was saved has no moments there.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad()
    for name, parameter in parameters.items():
        optimizer.state.pop(parameter, None)
        if parameter.requires_grad and _has_moments(name, saved_names):
            parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _has_moments(name: str, saved_names: set[str]) -> bool:
    """Whether a parameter has moments in a checkpoint; without any, all should have, and loading says so."""
    has_any = any(saved.startswith("optimizer/") for saved in saved_names)
    return not has_any or any(saved.startswith(f"optimizer/{name}/") for saved in saved_names)
