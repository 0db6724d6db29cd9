"""Conversions between placements, forward and backward, on real processes."""

import itertools

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run_distributed
from outsize.model.operator_rules.placement import Partial, Replicate, Shard
from outsize.model.operator_rules.shards import join_shards, shard_of
from outsize.runtime.collectives import Conversion, OwnRandomStream, set_axis_group

PLACEMENTS = [
    Replicate(),
    Replicate(partial_gradient=True),
    Partial(),
    Shard(0),
    Shard(1),
    Shard(1, (6, 12)),
    Shard(0, (12,), atoms=4),
    Shard(1, (7, 11)),
]
OF_GRADIENT = {Replicate(): Replicate(), Replicate(True): Partial(), Partial(): Replicate()}


def shares(whole: torch.Tensor, placement, rank: int, degree: int) -> torch.Tensor:
    """What a rank holds; every rank draws the same shares of a partial sum."""
    if not isinstance(placement, Partial):
        return shard_of(whole, placement, degree, rank)
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(degree - 1)]
    return [*parts, whole - sum(parts)][rank]


def gathered(local: torch.Tensor, placement, degree: int) -> torch.Tensor:
    parts: list = [None] * degree
    dist.all_gather_object(parts, local.detach())
    if isinstance(placement, Replicate):
        assert all(torch.equal(part, parts[0]) for part in parts)
    return join_shards(parts, placement)


def convert_all(rank: int) -> list[str]:
    degree = dist.get_world_size()
    set_axis_group("tp", dist.group.WORLD, seed=0)
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(12, 18, generator=generator, dtype=torch.float64)
    gradient = torch.randn(12, 18, generator=generator, dtype=torch.float64)
    done = []
    for before, after in itertools.permutations(PLACEMENTS, 2):
        leaf = shares(value, before, rank, degree).clone().requires_grad_()
        result = Conversion(before, after)(leaf)
        torch.testing.assert_close(gathered(result, after, degree), value, rtol=0, atol=1e-12)
        of_after, of_before = OF_GRADIENT.get(after, after), OF_GRADIENT.get(before, before)
        result.backward(shares(gradient, of_after, rank, degree))
        found = gathered(leaf.grad, of_before, degree)
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12, msg=f"{before} -> {after}")
        done.append(f"{before} -> {after}")
    return done


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 3])
def test_every_conversion_keeps_the_value_and_its_gradient(degree):
    """Whatever the placements before and after, both ways, the whole is the same."""
    assert len(run_distributed(convert_all, degree)[0]) == len(PLACEMENTS) * (len(PLACEMENTS) - 1)


def draw(_rank: int) -> dict[str, torch.Tensor]:
    set_axis_group("tp", dist.group.WORLD, seed=0)
    torch.manual_seed(7)  # the shared stream: the same on all ranks
    dropout = torch.ops.aten.native_dropout.default
    ones = torch.ones(4000)
    own = OwnRandomStream(dropout)
    return {
        "own": own(ones, 0.25, True)[0],
        "own_again": own(ones, 0.25, True)[0],
        "shared": dropout(ones, 0.25, True)[0],
    }


@pytest.mark.distributed
def test_split_dropout_differs_between_ranks_and_whole_dropout_does_not():
    """Each rank draws its own masks for its shards; drawing them leaves the shared stream as it was."""
    first, second = run_distributed(draw, 2)
    assert torch.equal(first["shared"], second["shared"])
    torch.manual_seed(7)
    assert torch.equal(first["shared"], torch.ops.aten.native_dropout(torch.ones(4000), 0.25, True)[0])
    assert not torch.equal(first["own"], second["own"])
    assert not torch.equal(first["own"], first["own_again"])
    for mask in (first["own"], second["own"]):
        # 4000 draws at 3/4: the standard deviation of the share kept is 0.0068
        assert abs((mask > 0).double().mean() - 0.75) < 5 * 0.0068
