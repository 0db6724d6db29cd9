"""What of a model goes to the servers, what of that by rows, and what training leaves as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from outsize.errors import PlanError
from outsize.model.batch_norm import batch_norm_warnings
from outsize.model.deferred import DeferredModel
from outsize.model.program import NodeKind, Program
from outsize.model.tables import matching_names
from outsize.runtime.parameter_server.layout import Shard, Variable
from outsize.runtime.parameter_server.part_model import PartModel

__all__ = ["InitialValues", "JobVariables", "find_variables"]


@dataclass(frozen=True)
class JobVariables:
    """Trained parameters as variables; names of frozen parameters and of saved buffers."""

    variables: tuple[Variable, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    tables: Mapping[str, nn.Embedding | nn.EmbeddingBag]  # row-wise, by the name of their weight

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of all that is saved and not trained."""
        return self.frozen + self.buffers


def find_variables(model: PartModel, row_wise: str | None) -> JobVariables:
    """Return the variables of a model: what its forward uses. ``row_wise`` are names of tables or None.

    They are separated by commas and may have wildcards.

    Raises:
        PlanError: a name fits no table that only looks rows up, a table needs more than rows, or batch norm
            has statistics to train.
    """
    _refuse_batch_norm(model.module)
    tables = _chosen(_tables(model.deferred, model.recording), row_wise)
    parameters = {name: one for name, one in model.module.named_parameters() if name in model.held}
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    variables = tuple(
        Variable(name, tuple(parameter.shape), parameter.dtype, name in tables)
        for name, parameter in trained.items()
    )
    saved = model.held & set(model.module.state_dict(keep_vars=True))
    buffers = tuple(name for name, _ in model.module.named_buffers() if name in saved)
    frozen = tuple(name for name in parameters if name not in trained)
    return JobVariables(variables, frozen, buffers, tables)


class InitialValues:
    """First values of shards, those of every other strategy; the variable asked for last is kept."""

    def __init__(self, deferred: DeferredModel, seed: int) -> None:
        self._deferred, self._seed = deferred, seed
        self._last: dict[str, torch.Tensor] = {}

    def __call__(self, shard: Shard) -> torch.Tensor:
        """Return the rows of a shard."""
        name = shard.variable.name
        if name not in self._last:
            self._last.clear()  # before the next one is made
            self._last = self._deferred.materialise([name], seed=self._seed)
        whole = self._last[name]
        return whole[shard.first_row : shard.first_row + shard.num_rows] if whole.dim() else whole


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
    found = matching_names(tables, row_wise) if row_wise else {}
    for pattern, names in found.items():
        if not names:
            raise PlanError(
                f"No table is called {pattern!r}.",
                why=f"Tables that only look rows up: {', '.join(tables) or 'none'}.",
                attempt="one of these names, with wildcards such as '*'.",
            )
    wanted = {name for names in found.values() for name in names}
    chosen = {name: module for name, module in tables.items() if name in wanted}
    for name, module in chosen.items():
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise PlanError(
                f"The table {name} cannot be pulled by rows.",
                why="max_norm and scale_grad_by_freq need the whole table.",
                attempt="--row-wise without it, or a table without them.",
            )
    return chosen


def _refuse_batch_norm(module: nn.Module) -> None:
    if batch_norm_warnings(module):
        raise PlanError(
            "Parameter servers do not train batch norm.",
            why="Each worker would keep running statistics of its own, and no server has them.",
            attempt="another strategy, or group or layer norm.",
        )
