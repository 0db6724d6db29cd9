"""Replicas of a whole model: what their losses are divided by, how they begin, and who writes.

Numbers of the reference case: weight 0, x = 1, y = 1, 2 | 6, squared errors of a batch of 4 of which 3 came.

Tests of the strategies' semantics by number, and where they are:

1-5     denominators, penalties, empty shards          here
8       batch norm of replicas                         here, test_batch_norm
10, 13  checkpoints over replica counts, first values  here, test_checkpoint, test_products
11, 12  TF_CONFIG, chief and ids                       environment: test_tf_config, test_cluster_roles
14, 15  samples in order, who writes                   here
16      a killed process, and going on                 test_launch, test_worker
34-37   operators, pipelines, dropout                  test_tensor_parallel, test_pipeline_exactness,
                                                       test_random_streams
38, 39  shards equal replicas, predicted memory        test_state_sharding, test_state_sharding_memory
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.models import make_batch, tied_llama
from helpers.processes import run_distributed
from outsize.errors import PlanError
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.plan.plan_values import check_plan_values, with_denominator
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

SGD = OptimizerSpec("sgd", learning_rate=0.5)


class Regression(nn.Module):
    """Squared errors, and a penalty on a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.penalised = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        errors = nn.functional.mse_loss(self.weight * x, y)
        return {"loss": errors + self.penalised.square().sum()}


class Normed(nn.Module):
    """Batch norm of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=0.5).double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.norm(x).square().mean()}


def samples(*targets: float) -> dict[str, torch.Tensor]:
    y = torch.tensor(targets, dtype=torch.float64)
    return {"x": torch.ones_like(y), "y": y}


def make_plan(denominator: str, *, num_replicas: int = 2, num_samples: int = 4) -> Plan:
    mesh = Mesh(dp=num_replicas)
    plan = Plan("mirrored", mesh, (StageSpec(0, ""),), ScheduleSpec(), num_samples, optimizer=SGD)
    return with_denominator(plan, denominator)


def step_of(denominator: str, *targets: float) -> dict[str, float]:
    """Return what one step on these samples does, and their loss before."""
    model = parallelize(Regression, make_plan(denominator), sample_batch=samples(0, 0, 0, 0))
    batch = samples(*targets)
    evaluated = model.evaluate(batch)
    loss = model.compute_gradients(batch).loss
    gradients = {name: float(parameter.grad.sum()) for name, parameter in model.parameters.items()}
    model.train_step(batch)
    return {"evaluated": evaluated, "loss": loss, "after": model.parameters["weight"].item(), **gradients}


def targets_of_replica(*targets: float) -> list[float]:
    """Return which samples of a batch this process works on."""
    model = parallelize(Regression, make_plan("samples"), sample_batch=samples(0, 0, 0, 0))
    (microbatches,) = model._splitter.split(samples(*targets)).accumulation_steps
    return [target for each in microbatches for target in each.inputs.entries["y"].tolist()]


def running_statistics(batch_norm: str) -> list[float]:
    """Return running mean and variance after one step on 0 and 2 here, and 10 and 14 there."""
    x = torch.tensor([[0.0], [2.0], [10.0], [14.0]], dtype=torch.float64)
    plan = replace(make_plan("samples"), batch_norm=batch_norm)
    model = parallelize(Normed, plan, sample_batch={"x": x})
    model.train_step({"x": x})
    return [model._module.norm.running_mean.item(), model._module.norm.running_var.item()]


def on_two(rank: int, folder: Path) -> dict[str, Any]:
    """Do everything in one launch."""
    torch.manual_seed(rank)  # processes that draw other numbers
    model = parallelize(tied_llama, make_plan("samples"), sample_batch=make_batch(4, seed=0))
    first = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
    model.train_step(make_batch(3, seed=0))
    model.save_checkpoint(folder)
    return {
        "first": first,
        "loss after": model.evaluate(make_batch(4, seed=1)),
        "of batches": [targets_of_replica(0, 1, 2, 3), targets_of_replica(4, 5, 6)],
        **{each: running_statistics(each) for each in ("per_replica", "synchronised")},
        **{(each, 3): step_of(each, 1, 2, 6) for each in ("samples", "replicas")},
        **{(each, 1): step_of(each, 3) for each in ("samples", "replicas")},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[Any, Any]]:
    return run_distributed(on_two, 2, folder, timeout_s=100)


def test_a_short_batch_is_divided_by_its_samples(runs: list[dict[Any, Any]]) -> None:
    """Tests 1, 2, 4: gradient -6.0, as on one process; the penalty, which has no samples, counts once."""
    loss = 41 / 3 + 2
    expected = {"evaluated": loss, "loss": loss, "after": 3.0, "weight": -6.0, "penalised": 4.0}
    for run in runs:
        assert run["samples", 3] == pytest.approx(expected, rel=1e-12)


def test_means_of_replicas_are_those_of_other_frameworks(runs: list[dict[Any, Any]]) -> None:
    """Tests 1 to 3: gradient -7.5 as with DDP and TensorFlow; an evaluation is of the samples."""
    expected = {"evaluated": 41 / 3 + 2, "loss": 19.25 + 2, "after": 3.75, "weight": -7.5, "penalised": 4.0}
    for run in runs:
        assert run["replicas", 3] == pytest.approx(expected, rel=1e-12)


def test_a_replica_without_samples_adds_nothing(runs: list[dict[Any, Any]]) -> None:
    """Test 5: no NaN, and nobody waits; a mean over replicas counts it, as zero."""
    for run in runs:
        assert run["samples", 1] == pytest.approx(
            {"evaluated": 11, "loss": 11, "after": 3.0, "weight": -6.0, "penalised": 4.0}
        )
        assert run["replicas", 1] == pytest.approx(
            {"evaluated": 11, "loss": 5.5, "after": 1.5, "weight": -3.0, "penalised": 2.0}
        )


def test_batch_norm_sees_a_replica_or_all(runs: list[dict[Any, Any]]) -> None:
    """Test 8: each replica's own statistics, or the same on both, with torch's unbiased variance."""
    assert [run["per_replica"] for run in runs] == [[0.5, 1.5], [6.0, 4.5]]
    for run in runs:
        assert run["synchronised"] == pytest.approx([3.25, 0.5 + 0.5 * 131 / 3], rel=1e-12)


def test_replicas_begin_with_the_same_values(runs: list[dict[Any, Any]]) -> None:
    """Test 13: whatever a process has drawn before."""
    first, second = (run["first"] for run in runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert first.keys() == second.keys()


def test_samples_go_to_replicas_in_order(runs: list[dict[Any, Any]]) -> None:
    """Test 14: global batches of 4 over 7 samples."""
    assert runs[0]["of batches"] == [[0, 1], [4, 5]]
    assert runs[1]["of batches"] == [[2, 3], [6]]


def test_one_process_writes_what_replicas_hold(runs: list[dict[Any, Any]], folder: Path) -> None:
    """Tests 10 and 15: all of it is in the file of the first process, and loads on one."""
    files = [file.name for file in find_checkpoint(folder).glob("*.safetensors")]
    assert files == ["shard-00001-model-00001-of-00001.safetensors"]
    plan = make_plan("samples", num_replicas=1)
    model = parallelize(tied_llama, plan, sample_batch=make_batch(4, seed=0))
    model.load_checkpoint(folder)
    assert model.evaluate(make_batch(4, seed=1)) == pytest.approx(runs[0]["loss after"], rel=1e-12)


def test_an_unknown_denominator_is_refused() -> None:
    """In Python, a plan file and on the command line: the words there are."""
    with pytest.raises(PlanError, match="samples or replicas"):
        make_plan("batch")
    with pytest.raises(PlanError, match="samples or replicas"):
        check_plan_values(replace(make_plan("samples"), denominator="batch"))  # type: ignore[arg-type]
