"""State divided over replicas trains exactly like one process, at every level and with every other axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.exact_training import assert_trains_like_one_process
from helpers.models import tied_llama, untied_llama
from helpers.shardings import split_operators
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec

pytestmark = pytest.mark.distributed

OPTIMIZER = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_gradient_norm=0.3)
CUTS = {1: (), 2: ("model.layers.2",)}
LEVELS = ("full", "gradients", "optimizer_states", "none")


def make_plan(mesh: Mesh, level: str = "full", **changes: Any) -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(("", *CUTS[mesh.pp])))
    plan = Plan("fully_sharded", mesh, stages, ScheduleSpec("1f1b", 2), 12, optimizer=OPTIMIZER)
    return replace(plan, state_sharding=level, **changes)


def test_every_level_trains_exactly_on_two_processes() -> None:
    """Test 38: fully sharded equals replicas equals one process, with ragged labels and one clipped norm."""
    assert_trains_like_one_process(tied_llama, [make_plan(Mesh(fsdp=2), level) for level in LEVELS])


def test_products_of_four_processes_train_exactly() -> None:
    """B64, B169: four shards, shards within and replicas across (hybrid), and pipelines of shards."""
    hybrid, pipelined = Mesh(dp=2, fsdp=2), Mesh(pp=2, fsdp=2)
    plans = [make_plan(Mesh(fsdp=4))]
    plans += [make_plan(mesh, level) for mesh in (hybrid, pipelined) for level in LEVELS]
    assert_trains_like_one_process(tied_llama, plans)


def test_split_operators_with_sharded_state_train_exactly() -> None:
    """Rows of shards of operators, at every level."""
    plans = [
        split_operators(untied_llama, make_plan(Mesh(fsdp=2, tp=2), level))
        for level in ("full", "gradients", "optimizer_states")
    ]
    assert_trains_like_one_process(untied_llama, plans)


def test_batches_of_any_size_neither_hang_nor_count_wrong() -> None:
    """B151, B157: fewer samples than processes, so that some have no gradient for most blocks."""
    plans = [make_plan(Mesh(fsdp=2), level) for level in ("full", "gradients")]
    recomputed = (StageSpec(0, "", recompute=("model.layers.0", "model.layers.2")),)
    plans += [make_plan(Mesh(fsdp=2), stages=recomputed)]
    assert_trains_like_one_process(tied_llama, plans, [12, 1, 3, 7, 2])
