"""Placements cut a dim into parts that make it up again, evenly or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.model.operator_rules.placement import Shard, parse_placement, share_start
from outsize.model.operator_rules.shards import join_shards, local_shape, shard_of
from outsize.runtime.checkpoint_entry import sharded_entry


@st.composite
def cuts(draw) -> tuple[Shard, int, int]:
    """A placement of dim 1, the size of that dim and a degree it can be cut in."""
    degree = draw(st.integers(2, 5))
    atoms = draw(st.integers(degree, 9))
    pieces = tuple(atoms * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3))))
    return Shard(1, pieces, draw(st.sampled_from([0, atoms]))), sum(pieces), degree


@given(cuts())
def test_the_parts_of_all_ranks_make_up_the_whole(cut):
    """Each rank has something, no rank more than the first, and joining them gives the whole back."""
    placement, size, degree = cut
    whole = torch.arange(2 * size).view(2, size)
    shards = [shard_of(whole, placement, degree, rank) for rank in range(degree)]
    assert placement.fits((2, size), degree)
    assert torch.equal(join_shards(shards, placement), whole)
    shapes = [local_shape((2, size), placement, degree, rank) for rank in range(degree)]
    assert [tuple(shard.shape) for shard in shards] == shapes
    assert shapes[0] == max(shapes)
    assert min(shapes)[1] > 0


@given(cuts())
def test_a_checkpoint_knows_where_each_part_lies_in_the_whole(cut):
    """Chunks of all ranks, put at their offsets, fill the whole tensor once."""
    placement, size, degree = cut
    whole = torch.arange(2.0 * size).view(2, size)
    filled = torch.full_like(whole, -1)
    for rank in range(degree):
        entry = sharded_entry(shard_of(whole, placement, degree, rank), placement, degree, rank)
        assert entry.size() == whole.shape
        for offset, chunk in entry.chunks.items():
            target = filled.narrow(1, offset[1], chunk.shape[1])
            assert bool((target == -1).all())
            target.copy_(chunk)
    assert torch.equal(filled, whole)


@given(cuts())
def test_a_placement_is_read_as_it_was_written(cut):
    """Plans hold placements as text."""
    assert parse_placement(str(cut[0])) == cut[0]


def test_the_first_ranks_get_one_more():
    """Six over four: two, two, one, one."""
    assert [share_start(6, 4, rank) for rank in range(5)] == [0, 2, 4, 5, 6]


@pytest.mark.parametrize(
    ("placement", "size", "degree"),
    [(Shard(0), 6, 4), (Shard(0, (3,)), 3, 4), (Shard(0, (24,), atoms=5), 24, 4), (Shard(0, (6,)), 8, 4)],
)
def test_what_cannot_be_cut_is_told(placement, size, degree):
    """Unevenly without a size, into fewer parts than ranks, within an atom, and a dim of another size."""
    assert not placement.fits((size,), degree)
