"""Tied parameters and buffers over layouts, bucket sizes and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers.models import make_batch, reference_model, tied_llama, train_reference
from helpers.processes import run_distributed
from helpers.shardings import split_operators
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime import data_parallel
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

ADAMW = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_gradient_norm=0.5)
CUTS = {1: (), 2: ("model.layers.2",), 4: ("model.layers.1", "model.layers.2", "model.layers.3")}
TIE = "model.embed_tokens.weight"


def make_plan(mesh: Mesh, **changes: Any) -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(("", *CUTS[mesh.pp])))
    plan = Plan("combined", mesh, stages, ScheduleSpec("1f1b", 2), 8, optimizer=ADAMW)
    return replace(plan, **changes)


def batches(num_steps: int) -> list[dict[str, torch.Tensor]]:
    return [make_batch(8, seed=step) for step in range(num_steps)]


def train_tied(plan: Plan, num_steps: int) -> dict[str, torch.Tensor]:
    model = parallelize(tied_llama, plan, sample_batch=make_batch(2, seed=0))
    for batch in batches(num_steps):
        model.train_step(batch)
    assert sum(len(group["params"]) for group in model.optimizer.param_groups) == len(model.parameters)
    return {name: parameter.detach().clone() for name, parameter in model.parameters.items()}


def on_four(_rank: int, tied: Plan, split: Plan) -> tuple[Any, Any]:
    return train_tied(tied, 10), train_tied(split, 3)


def test_a_tie_over_four_ranks_trains_like_one_parameter() -> None:
    """B17, B21, B32: AdamW, weight decay, clipping, ten steps; whole or in shards both ends hold the same."""
    split = split_operators(tied_llama, make_plan(Mesh(pp=2, tp=2)))
    results = run_distributed(on_four, 4, make_plan(Mesh(pp=4)), split, timeout_s=100)
    expected = train_reference(tied_llama, batches(10), ADAMW)[3]
    for held, _ in results:
        for name, parameter in held.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-9)
    assert torch.equal(results[0][0][TIE], results[3][0][TIE])
    assert TIE not in results[1][0] | results[2][0]
    shards = [held[TIE] for _, held in results]  # ranks 0 and 1 begin the pipeline, 2 and 3 end it
    assert torch.equal(shards[0], shards[2])
    assert torch.equal(shards[1], shards[3])


class Normed(nn.Module):
    """A buffer that is saved and trained on, one that is rebuilt, and frozen parts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)
        )
        self.blocks[1].requires_grad_(False)
        self.register_buffer("table", 1.0 / torch.arange(1, 7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.table
        for block in self.blocks:
            x = block(x)
        return (x * self.table).square().mean()


def normed() -> nn.Module:
    return Normed().double()


def vectors(seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def normed_plan(mesh: Mesh) -> Plan:
    stages = (StageSpec(0, ""), StageSpec(1, "blocks.2"))[: mesh.pp]
    return make_plan(mesh, stages=stages, schedule=ScheduleSpec("1f1b", 1))


def buffers_of(model: Any) -> dict[str, torch.Tensor]:
    """Return all buffers that this process holds; none may be without values or elsewhere."""
    held = {name: buffer for name, buffer in model._module.named_buffers() if not buffer.is_meta}
    tensors = [*model.parameters.values(), *held.values()]
    assert {tensor.device for tensor in tensors} == {model.mesh.device}
    return {name: buffer.clone() for name, buffer in held.items()}


def on_two(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save and go on, in several ways."""
    found: dict[str, Any] = {}
    pipeline = make_plan(Mesh(pp=2))
    model = parallelize(tied_llama, pipeline, sample_batch=make_batch(2, seed=0))
    for batch in batches(2):
        model.train_step(batch)
    model.save_checkpoint(folder / "tied")
    found["tied loss"] = model.evaluate(make_batch(8, seed=9))
    again = parallelize(tied_llama, pipeline, sample_batch=make_batch(2, seed=0))
    again.load_checkpoint(folder / "tied")
    for each in (model, again):
        each.train_step(make_batch(8, seed=2))
    found["resumed is unbroken"] = all(
        torch.equal(parameter, again.parameters[name]) for name, parameter in model.parameters.items()
    )
    replicas = []
    for bucket_bytes in (data_parallel.BUCKET_BYTES, 1):
        data_parallel.BUCKET_BYTES = bucket_bytes
        replicas.append(train_tied(make_plan(Mesh(dp=2)), 3))
    found["buckets"] = all(torch.equal(replicas[0][name], replicas[1][name]) for name in replicas[0])
    frozen = parallelize(normed, normed_plan(Mesh(pp=2)), sample_batch=vectors(0))
    found["first buffers"] = buffers_of(frozen)
    for seed in range(3):
        frozen.train_step(vectors(seed))
    frozen.save_checkpoint(folder / "normed")
    found["normed loss"], found["buffers"] = frozen.evaluate(vectors(5)), buffers_of(frozen)
    found["rank"] = rank
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(on_two, 2, folder, timeout_s=100)


def test_a_tied_run_goes_on_bit_for_bit(runs: list[dict[str, Any]]) -> None:
    """B23: saved after two steps on two pipeline ranks and loaded, step three is that of the unbroken run."""
    assert all(run["resumed is unbroken"] for run in runs)


def test_a_tied_checkpoint_of_two_stages_loads_on_one(runs: list[dict[str, Any]], folder: Path) -> None:
    """B24: the loss is the one from before, with one optimizer entry for the tie."""
    model = parallelize(tied_llama, make_plan(Mesh()), sample_batch=make_batch(2, seed=0))
    model.load_checkpoint(folder / "tied")
    assert model.evaluate(make_batch(8, seed=9)) == pytest.approx(runs[0]["tied loss"], rel=1e-12)
    assert "lm_head.weight" not in model.parameters


def test_a_checkpoint_of_two_stages_is_the_models_own_dictionary(
    runs: list[dict[str, Any]], folder: Path
) -> None:
    """B25: its names are those of the model's state dict, the tie once; loaded, the tie is one object."""
    assert runs
    files = find_checkpoint(folder / "tied").glob("*.safetensors")
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    weights = {name: tensor for name, tensor in saved.items() if not name.startswith("optimizer/")}
    model = tied_llama()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weights[TIE])


def test_bucket_sizes_change_nothing(runs: list[dict[str, Any]]) -> None:
    """B19: three steps over two replicas, one bucket for all or one for each tensor: equal bit for bit."""
    assert all(run["buckets"] for run in runs)


def test_buffers_are_there_before_training_and_after_loading(
    runs: list[dict[str, Any]], folder: Path
) -> None:
    """B137, B140, B141, B188: saved ones are loaded, rebuilt ones are as constructed, outputs are equal."""
    expected = dict(reference_model(normed).named_buffers())
    for run in runs:
        for name, buffer in run["first buffers"].items():
            assert torch.equal(buffer, expected[name]), name
    model = parallelize(normed, normed_plan(Mesh()), sample_batch=vectors(0))
    model.load_checkpoint(folder / "normed")
    assert model.evaluate(vectors(5)) == pytest.approx(runs[0]["normed loss"], rel=1e-12)
    loaded = buffers_of(model)
    assert {name for run in runs for name in run["buffers"]} == set(loaded)
    for run in runs:
        for name, buffer in run["buffers"].items():
            assert torch.equal(loaded[name], buffer), name
    assert loaded["blocks.1.1.num_batches_tracked"].item() == 3
