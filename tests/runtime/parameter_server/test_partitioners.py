"""How many shards, and which rows; golden numbers measured on TensorFlow 2.21's sharded_variable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import PlanError
from outsize.runtime.parameter_server.partitioners import (
    FixedPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    checked_num_shards,
    row_counts,
    shard_of_rows,
)

_SHAPES = [(1024, 1024), (10, 3), (2, 300_000), (1_000_003, 8)]


@pytest.mark.parametrize(
    ("partitioner", "num_shards"),
    [
        (MinSizePartitioner(256 << 10, max_shards=4), [4, 1, 2, 4]),
        (MinSizePartitioner(), [1, 1, 1, 1]),
        (MaxSizePartitioner(1 << 20), [4, 1, 2, 31]),
        (MaxSizePartitioner(1 << 20, max_shards=2), [2, 1, 2, 2]),
        (FixedPartitioner(3), [3, 3, 2, 3]),
    ],
)
def test_partitioners_cut_as_tensorflow_does(partitioner: Partitioner, num_shards: list[int]) -> None:
    """float32 variables of four shapes."""
    assert [checked_num_shards(partitioner, shape, torch.float32) for shape in _SHAPES] == num_shards


def test_scalars_stay_whole() -> None:
    """A scalar has no rows to cut, and a partitioner is not asked."""
    assert checked_num_shards(FixedPartitioner(3), (), torch.float32) == 1
    assert checked_num_shards(None, (4,), torch.float32) == 1


@pytest.mark.parametrize("parts", [[1, 2], [0, 1], [5, 1], [2]])
def test_other_cuts_are_refused(parts: list[int]) -> None:
    """Another dim than the first, no parts, more parts than rows, a missing dim."""

    def custom(_shape: Sequence[int], _dtype: torch.dtype) -> Sequence[int]:
        return parts

    with pytest.raises(PlanError, match="first dim"):
        checked_num_shards(custom, (4, 4), torch.float32)


@pytest.mark.parametrize(
    ("num_rows", "num_shards", "counts"),
    [(13, 5, [3, 3, 3, 2, 2]), (10, 4, [3, 3, 2, 2]), (5, 2, [3, 2]), (2, 3, [1, 1, 0])],
)
def test_the_first_shards_are_one_row_longer(num_rows: int, num_shards: int, counts: list[int]) -> None:
    """The div rule."""
    assert row_counts(num_rows, num_shards) == counts


@given(st.integers(1, 60), st.integers(1, 12))
def test_every_row_is_found_where_the_div_rule_put_it(num_rows: int, num_shards: int) -> None:
    """Looking up all rows gives each shard's index as often as it has rows, in order."""
    found = shard_of_rows(torch.arange(num_rows), num_rows, num_shards)
    expected = [shard for shard, count in enumerate(row_counts(num_rows, num_shards)) for _ in range(count)]
    assert found.tolist() == expected
