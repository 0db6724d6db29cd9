"""A worker's side of the dense parameters: flat buffers as they travel, and tensors as a model sees them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outsize.runtime.parameter_server.layout import Layout, Shard

__all__ = ["DenseParameters"]


class DenseParameters:
    """One flat byte buffer a server, and every dense variable by name.

    A variable that lies whole on one server is a view of the buffer, so that nothing is copied. One cut into
    shards has memory of its own, and ``gather`` and ``scatter`` copy between the two.
    """

    def __init__(self, layout: Layout) -> None:
        self.buffers = [
            torch.zeros(layout.dense_bytes(server), dtype=torch.uint8) for server in range(layout.num_servers)
        ]
        tensors: dict[str, torch.Tensor] = {}
        self._pieces: list[tuple[Shard, torch.Tensor]] = []
        views = {
            shard: view
            for server, buffer in enumerate(self.buffers)
            for group in layout.dense_groups(server)
            for shard, view in group.shard_views(group.view(buffer))
        }
        for shard, view in views.items():
            if shard.num_rows == shard.variable.num_rows:
                tensors[shard.variable.name] = view
            else:
                self._pieces.append((shard, view))
        for shard, _ in self._pieces:
            variable = shard.variable
            if variable.name not in tensors:
                tensors[variable.name] = torch.zeros(variable.shape, dtype=variable.dtype)
        self.tensors = {one.name: tensors[one.name] for one in layout.variables if not one.row_wise}

    @property
    def num_bytes(self) -> int:
        """The memory of all this."""
        cut = {shard.variable.name for shard, _ in self._pieces}
        return sum(buffer.numel() for buffer in self.buffers) + sum(self.tensors[name].nbytes for name in cut)

    def gather(self) -> None:
        """Copy the shards of cut variables out of the buffers."""
        for shard, view in self._pieces:
            self._rows(shard).copy_(view)

    def scatter(self) -> None:
        """Copy cut variables into the buffers."""
        for shard, view in self._pieces:
            view.copy_(self._rows(shard))

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the named variables, zero the others, and write the buffers."""
        for name, tensor in self.tensors.items():
            given = values.get(name)
            if given is None:
                tensor.zero_()
            elif not given.is_set_to(tensor):
                tensor.copy_(given.detach())
        self.scatter()

    def _rows(self, shard: Shard) -> torch.Tensor:
        return self.tensors[shard.variable.name][shard.first_row : shard.first_row + shard.num_rows]
