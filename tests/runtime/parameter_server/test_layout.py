"""Placement of shards on servers."""

from __future__ import annotations

import json

import torch

from outsize.runtime.parameter_server.layout import Layout, Variable, place_variables
from outsize.runtime.parameter_server.partitioners import FixedPartitioner

_VARIABLES = [
    Variable("scalar", ()),
    Variable("matrix", (5, 2), torch.float64),
    Variable("table", (7, 3), row_wise=True),
    Variable("vector", (4,)),
]


def test_one_counter_places_all_shards_round_robin() -> None:
    """A scalar on server 0, its neighbour's two shards on 1 and 0 (measured on TensorFlow), rows 3 and 2."""
    layout = place_variables(_VARIABLES, 2, FixedPartitioner(2))
    placed = [(shard.variable.name, shard.server, shard.first_row, shard.num_rows) for shard in layout.shards]
    assert placed == [
        ("scalar", 0, 0, 1), ("matrix", 1, 0, 3), ("matrix", 0, 3, 2), ("table", 1, 0, 4), ("table", 0, 4, 3),
        ("vector", 1, 0, 2), ("vector", 0, 2, 2),
    ]  # fmt: skip


def test_dense_shards_of_a_dtype_lie_back_to_back() -> None:
    """Server 0 holds 1 + 2 float32 numbers, then, aligned to 64 bytes, 4 float64 numbers; no table rows."""
    groups = place_variables(_VARIABLES, 2, FixedPartitioner(2)).dense_groups(0)
    assert [(group.dtype, group.start_byte, group.end_byte) for group in groups] == [
        (torch.float32, 0, 12),
        (torch.float64, 64, 96),
    ]
    flat = torch.zeros(96, dtype=torch.uint8)
    shard, view = groups[1].shard_views(groups[1].view(flat))[0]
    view.fill_(1.0)
    assert shard.variable.name == "matrix"
    assert view.shape == (2, 2)
    assert flat[64:].view(torch.float64).tolist() == [1.0] * 4


def test_a_layout_survives_json() -> None:
    """Every role derives the same layout from the same text."""
    layout = place_variables(_VARIABLES, 3, FixedPartitioner(2))
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
