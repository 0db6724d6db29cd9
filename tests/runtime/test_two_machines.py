"""Training over two machines with networks of their own (in namespaces), started rank by rank."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil
import pytest
import torch.distributed as dist

from helpers.exact_training import NUM_STEPS, TrainedRank, assert_equal_to_reference, batches, train
from helpers.machines import Machine, two_machines
from helpers.models import tied_llama, train_reference
from helpers.processes import run_distributed
from helpers.shardings import split_operators
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.environment.read_environment import read_environment
from outsize.runtime.job_store import join_store
from outsize.runtime.launch import gloo_interface

pytestmark = pytest.mark.distributed

OPTIMIZER = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_gradient_norm=0.3)
NUM_SAMPLES = 8
BYTES_PER_S = 2_000_000  # of the slow cable, 16 Mbit/s


@dataclass(frozen=True)
class RankOfMachine:
    """What a rank has of a run, what its machine has sent over the cable and to itself, and seconds."""

    trained: TrainedRank
    sent_bytes: int
    kept_bytes: int
    seconds: float


def train_on(rank: int, machines: tuple[Machine, Machine], plan: Plan) -> RankOfMachine:
    """Train as a launcher's process on one of the machines would, knowing the first one's address."""
    per_machine = plan.mesh.world_size // 2
    machine = machines[rank // per_machine]
    machine.enter()
    os.environ.pop("GLOO_SOCKET_IFNAME")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % per_machine),
        WORLD_SIZE=str(plan.mesh.world_size),
        LOCAL_WORLD_SIZE=str(per_machine),
        MASTER_ADDR=machines[0].address,
        MASTER_PORT="29400",
    )
    environment = read_environment(os.environ)
    store = join_store(environment)
    os.environ.update(gloo_interface(environment))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.mesh.world_size)
    started = time.perf_counter()
    trained = train(tied_llama, plan, batches([NUM_SAMPLES] * NUM_STEPS))
    dist.barrier()
    seconds = time.perf_counter() - started
    sent = {name: counts.bytes_sent for name, counts in psutil.net_io_counters(pernic=True).items()}
    dist.barrier()
    return RankOfMachine(trained, sent[machine.interface], sent["lo"], seconds)


def train_on_two_machines(plan: Plan, *, rate: str | None = None) -> list[RankOfMachine]:
    """Train, and compare every rank with one process."""
    with two_machines(rate=rate) as machines:
        results = run_distributed(
            train_on, plan.mesh.world_size, machines, plan, timeout_s=100, process_group=False
        )
    expected = train_reference(tied_llama, batches([NUM_SAMPLES] * NUM_STEPS), OPTIMIZER)
    for result in results:
        assert_equal_to_reference(result.trained, expected, plan)
    assert {name for result in results for name in result.trained.parameters} == set(expected[3])
    return results


def make_plan(strategy: str, mesh: Mesh) -> Plan:
    stages = (StageSpec(0, ""), StageSpec(1, "model.layers.2"))[: mesh.pp]
    return Plan(strategy, mesh, stages, ScheduleSpec("1f1b", 2), NUM_SAMPLES, optimizer=OPTIMIZER)


def test_replicas_on_two_machines_over_a_slow_link_train_exactly() -> None:
    """multi_worker_mirrored: gradients cross the link once a step, which takes as long as the link needs."""
    first, second = train_on_two_machines(make_plan("multi_worker_mirrored", Mesh(dp=2)), rate="16mbit")
    gradient_bytes = sum(parameter.nbytes for parameter in first.trained.parameters.values())
    crossed = (NUM_STEPS + 1) * gradient_bytes  # the first gradients are computed twice
    for result in (first, second):
        assert crossed < result.sent_bytes < 1.5 * crossed
        assert result.seconds > 0.8 * crossed / BYTES_PER_S


def test_stages_across_machines_with_operators_split_within_train_exactly() -> None:
    """What split operators exchange stays in a machine; what stages send over the link is less."""
    plan = split_operators(tied_llama, make_plan("combined", Mesh(pp=2, tp=2)))
    for result in train_on_two_machines(plan):
        assert 0 < result.sent_bytes < 0.5 * result.kept_bytes
