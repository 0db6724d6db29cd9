"""Checkpoints go from plan to plan: a run that changes its layout on the way ends where it would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import make_batch, tied_llama, train_reference, untied_llama
from helpers.processes import run_distributed
from helpers.shardings import split_operators
from outsize.errors import LaunchError, PlanError
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.checkpoint_entry import sharded_entry, whole_entry
from outsize.runtime.parallelize import parallelize

OPTIMIZER = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1)
CUTS = {1: (), 2: ("model.layers.2",), 4: ("model.layers.1", "model.layers.2", "model.layers.3")}


def make_plan(mesh: Mesh, optimizer: OptimizerSpec = OPTIMIZER) -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(("", *CUTS[mesh.pp])))
    plan = Plan("pipeline_parallel", mesh, stages, ScheduleSpec("1f1b", 2), 8, optimizer=optimizer)
    return split_operators(tied_llama, plan) if mesh.tp > 1 else plan


def batches(first: int, last: int) -> list[dict[str, torch.Tensor]]:
    return [make_batch(8, seed=step) for step in range(first, last)]


def go_on(_rank: int, plan: Plan, folder: Path, first: int, last: int) -> dict[str, torch.Tensor]:
    """Load the newest checkpoint unless at the start, train from step ``first`` to ``last``, save."""
    model = parallelize(tied_llama, plan, sample_batch=batches(0, 1)[0])
    if first:
        model.load_checkpoint(folder)
    assert model.num_steps == first
    for batch in batches(first, last):
        model.train_step(batch)
    model.save_checkpoint(folder)
    return {name: parameter.detach().clone() for name, parameter in model.parameters.items()}


@pytest.mark.distributed
def test_a_run_that_changes_its_plan_ends_where_one_process_does(tmp_path: Path) -> None:
    """B24, B27: two pipeline ranks, one process, tp 2, four pipeline ranks: eight steps, to 1e-10."""
    layouts = [Mesh(pp=2), Mesh(), Mesh(tp=2), Mesh(pp=4)]
    for number, mesh in enumerate(layouts):
        results = run_distributed(
            go_on, mesh.world_size, make_plan(mesh), tmp_path, 2 * number, 2 * number + 2
        )
    expected = train_reference(tied_llama, batches(0, 8), OPTIMIZER)[3]
    assert {name for held in results for name in held} == set(expected)
    for held in results:
        for name, parameter in held.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-10)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    go_on(0, make_plan(Mesh()), tmp_path, 0, 1)
    return tmp_path


def test_files_hold_no_pickles_and_plain_names(checkpoint: Path) -> None:
    """Weights are safetensors under the names that the model gives them, tied ones once."""
    from safetensors import safe_open

    found = find_checkpoint(checkpoint)
    names: set[str] = set()
    for path in found.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
        else:
            description = json.loads(path.read_text())
            assert description["format_version"] == description["step"] == 1
            assert description["files"] == {p.name: p.stat().st_size for p in found.glob("*.safetensors")}
    assert "model.embed_tokens.weight" in names
    assert "optimizer/model.layers.0.self_attn.q_proj.weight/exp_avg_sq" in names
    assert "lm_head.weight" not in names


def test_another_model_is_refused_and_nothing_changes(checkpoint: Path) -> None:
    """An untied model misses its head in the checkpoint; the message names it."""
    model = parallelize(untied_llama, make_plan(Mesh()), sample_batch=make_batch(8, seed=0))
    before = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
    with pytest.raises(PlanError, match=r"lm_head\.weight is not in it"):
        model.load_checkpoint(checkpoint)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.parameters.items())


def test_another_optimizer_is_refused(checkpoint: Path) -> None:
    """Momentum cannot be read from AdamW's moments."""
    plan = make_plan(Mesh(), OptimizerSpec("sgd", momentum=0.9))
    model = parallelize(tied_llama, plan, sample_batch=make_batch(8, seed=0))
    with pytest.raises(PlanError, match="momentum_buffer is not in it"):
        model.load_checkpoint(checkpoint)


def test_an_interrupted_save_leaves_the_last_checkpoint_in_place(checkpoint: Path) -> None:
    """Half-written folders and a pointer to them are never taken for a checkpoint."""
    (checkpoint / "step-00000009.partial").mkdir()
    assert find_checkpoint(checkpoint).name == "step-00000001"
    (checkpoint / "latest").write_text("step-00000009.partial\n")
    with pytest.raises(LaunchError, match="no checkpoint"):
        find_checkpoint(checkpoint)


@pytest.mark.parametrize("pointer", ["../elsewhere", "/etc", ""])
def test_the_pointer_stays_in_its_folder(checkpoint: Path, pointer: str) -> None:
    """`latest` names a folder beside it and nothing else."""
    (checkpoint / "latest").write_text(pointer)
    with pytest.raises(LaunchError, match="no checkpoint"):
        find_checkpoint(checkpoint)


def test_nothing_to_load_is_an_error(tmp_path: Path) -> None:
    """B117: loading from an empty folder does not start anew in silence."""
    with pytest.raises(LaunchError, match="no checkpoint"):
        find_checkpoint(tmp_path)


def test_chunks_of_a_fused_dim_cover_the_whole_once() -> None:
    """Segments of 4, 2 and 2 rows over two ranks: eight rows, each in exactly one chunk."""
    from outsize.model.operator_rules.placement import Shard
    from outsize.model.operator_rules.shards import shard_of

    whole = torch.arange(24.0).view(8, 3)
    placement = Shard(0, (4, 2, 2))
    rebuilt: Any = torch.full_like(whole, -1)
    for rank in range(2):
        entry = sharded_entry(shard_of(whole, placement, 2, rank), placement, 2, rank)
        assert entry.size() == whole.size()
        for offset, chunk in entry.chunks.items():
            part = rebuilt[offset[0] : offset[0] + chunk.shape[0]]
            assert (part == -1).all()
            part.copy_(chunk)
    assert torch.equal(rebuilt, whole)


def test_a_scalar_is_an_entry_of_one_element_that_loads_in_place() -> None:
    """Step counters of optimizers share memory with their entry."""
    step = torch.tensor(3.0)
    entry = whole_entry(step)
    entry.chunks[torch.Size([0])].fill_(7.0)
    assert step.item() == 7.0
