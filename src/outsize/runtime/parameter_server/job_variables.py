"""What of a model goes to the servers, what of that by rows, and what training leaves as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from outsize.errors import PlanError
from outsize.model.batch_norm import batch_norm_warnings
from outsize.model.deferred import DeferredModel
from outsize.model.program import NodeKind, Program
from outsize.runtime.parameter_server.layout import Shard, Variable
from outsize.runtime.parameter_server.partitioners import (
    FixedPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from outsize.units import parse_bytes

__all__ = ["JobVariables", "find_variables", "initial_values", "parse_partitioner"]

_PARTITIONERS = "fixed:4 (shards), min_size:256KiB:4 (bytes, most shards), max_size:1MiB (bytes)"


@dataclass(frozen=True)
class JobVariables:
    """Trained parameters as variables; names of frozen parameters and saved buffers as constants."""

    variables: tuple[Variable, ...]
    constants: tuple[str, ...]
    tables: Mapping[str, nn.Embedding | nn.EmbeddingBag]  # row-wise, by the name of their weight


def find_variables(deferred: DeferredModel, recording: Program, row_wise: str | None) -> JobVariables:
    """Return the variables of a model. ``row_wise`` are comma-separated names with wildcards, or None.

    Raises:
        PlanError: a name fits no table that only looks rows up, or batch norm has statistics to train.
    """
    _refuse_batch_norm(deferred.module)
    tables = _chosen(_tables(deferred, recording), row_wise)
    parameters = dict(deferred.module.named_parameters())
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    variables = tuple(
        Variable(name, tuple(parameter.shape), parameter.dtype, name in tables)
        for name, parameter in trained.items()
    )
    saved = set(deferred.module.state_dict(keep_vars=True))
    buffers = [name for name, _ in deferred.module.named_buffers() if name in saved]
    constants = [name for name in parameters if name not in trained] + buffers
    return JobVariables(variables, tuple(constants), tables)


def initial_values(deferred: DeferredModel, seed: int, shard: Shard) -> torch.Tensor:
    """Return the first values of a shard, the same as under every other strategy."""
    name, first = shard.variable.name, shard.first_row

    def rows(_: str, whole: torch.Tensor) -> torch.Tensor:
        return whole[first : first + shard.num_rows] if whole.dim() else whole

    return deferred.materialise([name], seed=seed, select=rows)[name]


def parse_partitioner(text: str | None) -> Partitioner | None:
    """Return the partitioner that a text such as ``max_size:1MiB`` names; None keeps variables whole.

    Raises:
        PlanError: there is no such partitioner.
    """
    if text is None:
        return None
    name, _, rest = text.partition(":")
    numbers = rest.split(":")
    try:
        if name == "fixed" and len(numbers) == 1:
            return FixedPartitioner(int(numbers[0]))
        if name == "min_size" and len(numbers) == 2:
            return MinSizePartitioner(parse_bytes(numbers[0]), int(numbers[1]))
        if name == "max_size" and len(numbers) == 1:
            return MaxSizePartitioner(parse_bytes(numbers[0]))
    except ValueError as error:
        raise PlanError(f"{text!r} is not a partitioner.", why=str(error), attempt=_PARTITIONERS) from None
    raise PlanError(f"{text!r} is not a partitioner.", attempt=_PARTITIONERS)


def _tables(deferred: DeferredModel, recording: Program) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the trained embeddings whose weight nothing but their own look-up reads."""
    read_elsewhere = {str(node.target) for node in recording.nodes if node.kind is NodeKind.PARAMETER}
    shared = set(deferred.ties.values())
    found = {}
    for path, module in deferred.module.named_modules():
        if type(module) in (nn.Embedding, nn.EmbeddingBag) and module.weight.requires_grad:
            name = f"{path}.weight" if path else "weight"
            if name not in read_elsewhere | shared:
                found[name] = module
    return found


def _chosen(
    tables: Mapping[str, nn.Embedding | nn.EmbeddingBag], row_wise: str | None
) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    patterns = [pattern.strip() for pattern in row_wise.split(",")] if row_wise else []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tables):
            raise PlanError(
                f"No table is called {pattern!r}.",
                why=f"Tables that only look rows up: {', '.join(tables) or 'none'}.",
                attempt="one of these names, with wildcards such as '*'.",
            )
    return {
        name: module
        for name, module in tables.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _refuse_batch_norm(module: nn.Module) -> None:
    if batch_norm_warnings(module):
        raise PlanError(
            "Parameter servers do not train batch norm.",
            why="Each worker would keep running statistics of its own, and no server has them.",
            attempt="another strategy, or group or layer norm.",
        )
