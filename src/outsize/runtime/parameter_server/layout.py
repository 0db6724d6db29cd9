"""Which server holds which rows of which variable, as plain data that every process derives alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outsize.runtime.parameter_server.partitioners import Partitioner, checked_num_shards, row_counts

__all__ = ["DenseGroup", "Layout", "Shard", "Variable", "place_variables"]

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Variable:
    """A parameter by its full name. ``row_wise`` ones (embedding tables) are pulled and pushed by rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    row_wise: bool = False

    @property
    def num_rows(self) -> int:
        """The length of the first dim; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """The number of elements in one row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Shard:
    """Rows ``first_row`` to ``first_row + num_rows`` of a variable, on one server."""

    variable: Variable
    part: int
    first_row: int
    num_rows: int
    server: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this shard; a scalar stays one."""
        return (self.num_rows, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def num_bytes(self) -> int:
        """The size of this shard's values."""
        return self.num_rows * self.variable.row_elements * self.variable.dtype.itemsize


@dataclass(frozen=True)
class DenseGroup:
    """The dense shards of one dtype on a server, back to back in its flat buffer.

    ::

        flat bytes:  [ float32: a/0 | b/0 | c ][ pad ][ float64: d/1 ]
                       start_byte ... end_byte
    """

    dtype: torch.dtype
    start_byte: int
    end_byte: int
    shards: tuple[Shard, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this group's part of a flat byte buffer as a vector of its dtype."""
        return flat[self.start_byte : self.end_byte].view(self.dtype)

    def shard_views(self, vector: torch.Tensor) -> list[tuple[Shard, torch.Tensor]]:
        """Return every shard with its view of what ``view`` returned, or of a vector as long."""
        pieces = torch.split(vector, [math.prod(shard.shape) for shard in self.shards])
        return [(shard, piece.view(shard.shape)) for shard, piece in zip(self.shards, pieces, strict=True)]


@dataclass(frozen=True)
class Layout:
    """All variables, and their shards in order of placement."""

    num_servers: int
    variables: tuple[Variable, ...]
    shards: tuple[Shard, ...]

    def variable(self, name: str) -> Variable:
        """Return a variable by name.

        Raises:
            KeyError: there is none.
        """
        for variable in self.variables:
            if variable.name == name:
                return variable
        raise KeyError(f"no variable {name!r}; there are {', '.join(one.name for one in self.variables)}")

    def shards_of(self, name: str) -> list[Shard]:
        """Return the shards of a variable, by rows."""
        return [shard for shard in self.shards if shard.variable.name == name]

    def table_shards(self, server: int) -> list[Shard]:
        """Return the shards of row-wise variables on a server, in the order in which messages carry them."""
        return [shard for shard in self.shards if shard.server == server and shard.variable.row_wise]

    def dense_groups(self, server: int) -> list[DenseGroup]:
        """Return the dense shards of a server by dtype, where each lies in the server's flat buffer."""
        mine = [shard for shard in self.shards if shard.server == server and not shard.variable.row_wise]
        groups: list[DenseGroup] = []
        start = 0
        for dtype in dict.fromkeys(shard.variable.dtype for shard in mine):
            shards = tuple(shard for shard in mine if shard.variable.dtype == dtype)
            end = start + sum(shard.num_bytes for shard in shards)
            groups.append(DenseGroup(dtype, start, end, shards))
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return groups

    def dense_bytes(self, server: int) -> int:
        """Return the size of a server's flat buffer."""
        return max((group.end_byte for group in self.dense_groups(server)), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which ``from_json`` rebuilds the layout."""
        variables = [
            asdict(variable) | {"dtype": str(variable.dtype).removeprefix("torch.")}
            for variable in self.variables
        ]
        placed = [
            [shard.variable.name, shard.part, shard.first_row, shard.num_rows, shard.server]
            for shard in self.shards
        ]
        return {"num_servers": self.num_servers, "variables": variables, "shards": placed}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Rebuild what ``to_json`` wrote."""
        variables = tuple(
            Variable(entry["name"], tuple(entry["shape"]), getattr(torch, entry["dtype"]), entry["row_wise"])
            for entry in data["variables"]
        )
        by_name = {variable.name: variable for variable in variables}
        shards = tuple(Shard(by_name[name], *numbers) for name, *numbers in data["shards"])
        return cls(data["num_servers"], variables, shards)


def place_variables(
    variables: Sequence[Variable], num_servers: int, partitioner: Partitioner | None = None
) -> Layout:
    """Return where everything goes: shards round-robin over the servers, one counter for all variables.

    Raises:
        PlanError: the partitioner asks for something impossible.
    """
    shards: list[Shard] = []
    for variable in variables:
        num_shards = checked_num_shards(partitioner, variable.shape, variable.dtype)
        first_row = 0
        for part, num_rows in enumerate(row_counts(variable.num_rows, num_shards)):
            shards.append(Shard(variable, part, first_row, num_rows, len(shards) % num_servers))
            first_row += num_rows
    return Layout(num_servers, tuple(variables), tuple(shards))
