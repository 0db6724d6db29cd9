"""Rows of tables on their way to servers: made distinct, sent where they live, put back in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outsize.errors import TrainingError
from outsize.runtime.parameter_server.layout import Layout, Shard, Variable
from outsize.runtime.parameter_server.partitioners import shard_of_rows
from outsize.runtime.parameter_server.protocol import pack_rows, unpack_values

__all__ = ["RowRouting"]


class RowRouting:
    """The distinct rows of every table that one pull or push touches.

    ``rows`` maps a table to indices of any shape, repeated ones allowed. For a push, ``gradients`` maps it to
    their gradients of shape (*indices.shape, ...); those of equal rows are summed before they travel.
    """

    def __init__(
        self,
        layout: Layout,
        rows: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._layout, self._rows = layout, rows
        self._inverse: dict[str, torch.Tensor] = {}
        self._where: dict[Shard, torch.Tensor] = {}  # positions among the distinct rows, by shard
        self._local: dict[Shard, torch.Tensor] = {}  # row indices within the shard
        self._gradient: dict[Shard, torch.Tensor] = {}
        for name, indices in rows.items():
            self._route(_checked_table(layout, name, indices), indices, (gradients or {}).get(name))

    def message(self, server: int) -> torch.Tensor:
        """Return the buffer for one server; empty where nothing goes there."""
        shards = self._layout.table_shards(server)
        if not any(len(self._local.get(shard, ())) for shard in shards):
            return torch.empty(0, dtype=torch.uint8)
        rows = [self._local.get(shard, torch.empty(0, dtype=torch.int64)) for shard in shards]
        gradients = [self._gradient[shard] for shard in shards if shard in self._gradient]
        return pack_rows(rows, gradients)

    def assemble(self, answers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values of every table, of shape (*indices.shape, ...), from every server's answer."""
        distinct = {
            name: torch.empty(
                int(inverse.max()) + 1 if inverse.numel() else 0,
                *self._layout.variable(name).shape[1:],
                dtype=self._layout.variable(name).dtype,
            )
            for name, inverse in self._inverse.items()
        }
        for server, answer in enumerate(answers):
            shards = self._layout.table_shards(server)
            counts = [len(self._local.get(shard, ())) for shard in shards]
            if not sum(counts):
                continue
            for shard, values in zip(shards, unpack_values(shards, counts, answer), strict=True):
                if len(values):
                    distinct[shard.variable.name][self._where[shard]] = values
        return {name: distinct[name][inverse] for name, inverse in self._inverse.items()}

    def _route(self, table: Variable, indices: torch.Tensor, gradient: torch.Tensor | None) -> None:
        distinct, inverse = torch.unique(indices, return_inverse=True)
        self._inverse[table.name] = inverse
        summed = None if gradient is None else _sum_equal_rows(table, distinct, inverse, gradient)
        shards = self._layout.shards_of(table.name)
        owner = shard_of_rows(distinct, table.num_rows, len(shards))
        for shard in shards:
            where = (owner == shard.part).nonzero().view(-1)
            self._where[shard] = where
            self._local[shard] = distinct[where] - shard.first_row
            if summed is not None:
                self._gradient[shard] = summed[where]


def _sum_equal_rows(
    table: Variable, distinct: torch.Tensor, inverse: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    if gradient.shape != (*inverse.shape, *table.shape[1:]):
        raise TrainingError(
            f"gradients of shape {tuple(gradient.shape)} for table {table.name}",
            why=f"its rows have shape {table.shape[1:]} and {tuple(inverse.shape)} of them are named",
        )
    total = torch.zeros(len(distinct), *table.shape[1:], dtype=table.dtype)
    return total.index_add_(
        0, inverse.view(-1), gradient.detach().reshape(-1, *table.shape[1:]).to(table.dtype)
    )


def _checked_table(layout: Layout, name: str, indices: torch.Tensor) -> Variable:
    table = layout.variable(name)
    if not table.row_wise:
        raise TrainingError(f"{name} is not row-wise", attempt="mark the variable as row_wise")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < table.num_rows:
        raise TrainingError(
            f"rows {int(indices.min())} to {int(indices.max())} of table {name}",
            why=f"it has {table.num_rows} rows",
        )
    return table
