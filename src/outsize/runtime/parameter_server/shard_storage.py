"""The values and optimizer states that one server holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from outsize.runtime.parameter_server.layout import Layout, Shard
from outsize.runtime.parameter_server.optimizer import OptimizerSettings, ShardOptimizer
from outsize.runtime.parameter_server.protocol import RowUpdate

__all__ = ["ShardStorage", "ShardValues"]

ShardValues = dict[str, torch.Tensor]
"""A shard's ``value``, its optimizer states by name, and ``step``."""


class ShardStorage:
    """Dense shards lie in one flat buffer, which is sent as it is; tables are a tensor each.

    A buffer that is being sent is *borrowed*. An update that finds its buffer borrowed goes on in a copy, so
    that a reader sees one version and a slow reader holds nobody up; without readers nothing is copied.
    The caller holds a lock around every call.
    """

    def __init__(self, layout: Layout, server: int, settings: OptimizerSettings) -> None:
        self._groups = layout.dense_groups(server)
        self.shards = [shard for shard in layout.shards if shard.server == server]
        self._flat = torch.zeros(layout.dense_bytes(server), dtype=torch.uint8)
        self._optimizers = [ShardOptimizer(settings, group.view(self._flat)) for group in self._groups]
        self.table_shards = layout.table_shards(server)
        self._tables = [
            ShardOptimizer(settings, torch.zeros(shard.shape, dtype=shard.variable.dtype))
            for shard in self.table_shards
        ]
        self._borrowed: Counter[int] = Counter()

    def borrow(self) -> torch.Tensor:
        """Return the flat buffer for sending; give it back afterwards."""
        self._borrowed[self._flat.data_ptr()] += 1
        return self._flat

    def give_back(self, flat: torch.Tensor) -> None:
        """End a ``borrow``."""
        self._borrowed[flat.data_ptr()] -= 1

    def read_rows(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the rows asked for in each table shard."""
        return [
            optimizer.parameter.detach()[indices]
            for optimizer, indices in zip(self._tables, rows, strict=True)
        ]

    def apply(self, dense: torch.Tensor | None, rows: Sequence[RowUpdate]) -> None:
        """Step the optimizer with a flat gradient of all dense shards, and with gradients of some rows."""
        if dense is not None:
            self._stop_sharing()
            for group, optimizer in zip(self._groups, self._optimizers, strict=True):
                optimizer.step(group.view(dense))
        for position, optimizer in enumerate(self._tables):
            if position < len(rows) and len(rows[position][0]):
                optimizer.step_rows(*rows[position])
            else:
                optimizer.skip_step()

    def add_dense(self, total: torch.Tensor, dense: torch.Tensor) -> None:
        """Add one flat gradient to another."""
        for group in self._groups:
            group.view(total).add_(group.view(dense))

    def set_shard(self, shard: Shard, values: ShardValues) -> None:
        """Overwrite a shard's value and, where given, its optimizer states."""
        self._stop_sharing()
        for name, tensor in self.values_of(shard).items():
            if name in values:
                tensor.copy_(values[name])

    def values_of(self, shard: Shard) -> ShardValues:
        """Return views of everything that belongs to a shard; not copies."""
        if shard.variable.row_wise:
            optimizer = self._tables[self.table_shards.index(shard)]
            states = {"value": optimizer.parameter.detach(), **optimizer.states}
            return states | {"step": optimizer.step_count}
        for group, optimizer in zip(self._groups, self._optimizers, strict=True):
            if shard in group.shards:
                tensors = {"value": optimizer.parameter.detach(), **optimizer.states}
                views = {name: dict(group.shard_views(tensor))[shard] for name, tensor in tensors.items()}
                return views | {"step": optimizer.step_count}
        raise KeyError(f"{shard} is not on this server")

    def _stop_sharing(self) -> None:
        if self._borrowed[self._flat.data_ptr()] == 0:
            return
        self._flat = self._flat.clone()
        for group, optimizer in zip(self._groups, self._optimizers, strict=True):
            optimizer.rebind(group.view(self._flat))
