"""Products of stages, replicas, shards of state and split operators, and a checkpoint through them all.

Products of two axes with shards of state are in test_state_sharding.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.exact_training import assert_trains_like_one_process, held_part
from helpers.models import make_batch, tied_llama, train_reference
from helpers.processes import run_distributed
from helpers.shardings import split_operators
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

OPTIMIZER = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_gradient_norm=0.3)
CUTS = {1: (), 2: ("model.layers.2",)}
NUM_SAMPLES, STEPS_EACH = 12, 2


def make_plan(mesh: Mesh, level: str = "none") -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(("", *CUTS[mesh.pp])))
    plan = Plan("combined", mesh, stages, ScheduleSpec("1f1b", 2), NUM_SAMPLES, optimizer=OPTIMIZER)
    plan = replace(plan, state_sharding=level)
    return split_operators(tied_llama, plan) if mesh.tp > 1 else plan


def test_products_of_three_axes_train_exactly() -> None:
    """Stages, and operators split within them, with replicas or with shards of state: five AdamW steps."""
    plans = [make_plan(Mesh(pp=2, dp=2, tp=2)), make_plan(Mesh(pp=2, fsdp=2, tp=2), "full")]
    assert_trains_like_one_process(tied_llama, plans)


def go_through(rank: int, plans: list[Plan], folder: Path) -> dict[str, torch.Tensor]:
    """Train a few steps under each plan, each from the checkpoint that the one before has left."""
    for number, plan in enumerate(plans):
        model = parallelize(tied_llama, plan, sample_batch=make_batch(NUM_SAMPLES, seed=0))
        if number:
            model.load_checkpoint(folder)
        assert model.num_steps == number * STEPS_EACH
        for step in range(model.num_steps, model.num_steps + STEPS_EACH):
            model.train_step(make_batch(NUM_SAMPLES, seed=step))
        model.save_checkpoint(folder)
    assert plans[-1].mesh.coordinates(rank) == model.mesh.coordinates
    return {name: parameter.detach().clone() for name, parameter in model.parameters.items()}


def test_a_checkpoint_goes_from_product_to_product(tmp_path: Path) -> None:
    """Hybrid, stages with divided gradients, split operators with divided optimizer states, and back."""
    plans = [
        make_plan(Mesh(dp=2, fsdp=2), "full"),
        make_plan(Mesh(pp=2, fsdp=2), "gradients"),
        make_plan(Mesh(fsdp=2, tp=2), "optimizer_states"),
        make_plan(Mesh(pp=2, tp=2)),
        make_plan(Mesh(pp=2, fsdp=2), "full"),
    ]
    data = [make_batch(NUM_SAMPLES, seed=step) for step in range(STEPS_EACH * len(plans))]
    expected = train_reference(tied_llama, data, OPTIMIZER)[3]
    results = run_distributed(go_through, 4, plans, tmp_path, timeout_s=110)
    for rank, held in enumerate(results):
        for name, parameter in held.items():
            part = held_part(name, expected[name], plans[-1], plans[-1].mesh.coordinates(rank))
            torch.testing.assert_close(parameter, part, rtol=1e-10, atol=1e-10)
    assert {name for held in results for name in held} == set(expected)
