"""Random masks differ where they must, agree where they must, and come again after a restart."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.processes import run_distributed
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.parallelize import parallelize
from outsize.runtime.random_streams import random_stream, stream_seed

SAMPLE = {"points": torch.ones(8, 16)}


def place(rank: int, mesh: Mesh) -> ProcessMesh:
    return ProcessMesh(mesh, rank, torch.device("cpu"))


def test_stages_and_replicas_have_streams_of_their_own_and_split_groups_share_one() -> None:
    """B101, B102: seeds over pp 2 x dp 2 x tp 2 and three steps are twelve, equal within each tp group."""
    mesh = Mesh(pp=2, dp=2, tp=2)
    seeds = {
        (step, rank): stream_seed(7, step, place(rank, mesh)) for step, rank in product(range(3), range(8))
    }
    assert all(seeds[step, rank] == seeds[step, rank + 1] for step, rank in seeds if rank % 2 == 0)
    assert len(set(seeds.values())) == 12
    assert stream_seed(8, 0, place(0, mesh)) not in seeds.values()


def test_the_callers_own_stream_goes_on_as_it_was() -> None:
    """What a user draws after a step is what would have come without it."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with random_stream(0, 0, place(0, Mesh())):
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    assert not torch.equal(inside, expected)


class Dropping(nn.Module):
    """Two equal layers with a dropout after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            points = layer(points)
        return points.square().mean()


def masks(_rank: int, mesh: Mesh, folder: Path) -> list[torch.Tensor]:
    """Return the masks of a layer in steps 0 and 1, and in step 1 again after going on from a save."""
    stages = (StageSpec(0, ""), StageSpec(1, "layers.1"))[: mesh.pp]
    optimizer = OptimizerSpec("sgd", learning_rate=0.01)
    plan = Plan("combined", mesh, stages, ScheduleSpec("1f1b", 2), 8, optimizer=optimizer)
    seen: list[torch.Tensor] = []

    def start() -> Any:
        model = parallelize(Dropping, plan, sample_batch=SAMPLE)
        layer = 0 if mesh.pp == 2 and _rank < mesh.dp else 1
        dropout = model._module.get_submodule(f"layers.{layer}.1")
        dropout.register_forward_hook(lambda _module, _inputs, output: seen.append(output != 0))
        return model

    model = start()
    model.train_step(SAMPLE)
    model.save_checkpoint(folder)
    model.train_step(SAMPLE)
    model = start()
    model.load_checkpoint(folder)
    model.train_step(SAMPLE)
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(dp=2)])
def test_masks_differ_between_ranks_and_steps_and_come_again_after_a_restart(
    mesh: Mesh, tmp_path: Path
) -> None:
    """B102, B104, B128: no two stages or replicas drop alike; a resumed run drops as the unbroken one."""
    first, second = run_distributed(masks, 2, mesh, tmp_path)
    assert len(first) == len(second) == 6
    for mine, others in zip(first, second, strict=True):
        assert not torch.equal(mine, others)
    for seen in (first, second):
        assert not torch.equal(seen[0], seen[1]), "micro-batches"
        assert not torch.equal(seen[0], seen[2]), "steps"
        assert torch.equal(seen[2], seen[4])
        assert torch.equal(seen[3], seen[5])
