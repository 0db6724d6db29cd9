"""Planning whole jobs: textbook verdicts, forced choices, and mistakes."""

import subprocess
import sys

import pytest

from helpers.profiles import chain_profile
from outsize.cluster.argument import parse_cluster
from outsize.errors import DoesNotFitError, PlanError
from outsize.plan.plan import STRATEGIES, Mesh, OptimizerSpec
from outsize.planner.search import plan_job


def _plan(cluster: str = "4xcpu:100MiB", **wishes):
    batch = wishes.pop("global_batch", 16)
    return plan_job(chain_profile(), parse_cluster(cluster, num_cores=2), global_batch=batch, **wishes)


def test_replicas_do_not_split_a_model_and_pipelines_and_operators_do() -> None:
    """8 M parameters x 16 bytes = 122 MiB exceed 100 MiB whole, and fit split."""
    verdicts = {verdict.name: verdict for verdict in _plan().verdicts}
    assert tuple(verdicts) == STRATEGIES
    for name in ("mirrored", "multi_worker_mirrored"):
        assert not verdicts[name].fits
        assert verdicts[name].reason_code == "STATE_TOO_BIG"
        assert "more devices do not change that" in verdicts[name].reason
        assert verdicts[name].needed_bytes > 8_000_000 * 16
    for name in ("pipeline_parallel", "tensor_parallel", "fully_sharded"):
        assert verdicts[name].fits
        assert verdicts[name].needed_bytes <= 100 * 2**20


def test_a_parameter_server_does_not_split_the_model_either() -> None:
    """A worker still holds 8 M parameters and gradients, 61 MiB, on devices of 60 MiB."""
    verdict = {verdict.name: verdict for verdict in _plan("4xcpu:60MiB").verdicts}["parameter_server"]
    assert not verdict.fits
    assert verdict.reason_code == "STATE_TOO_BIG"


def test_a_small_model_on_slow_links_uses_fewer_devices() -> None:
    """Over 10 Gb/s Ethernet one device beats replicas of an 8 M parameter model."""
    best = _plan("2x1xRTX4090", global_batch=2, strategy="multi_worker_mirrored").best
    assert best.mesh.world_size == 1


@pytest.mark.parametrize("mesh", [Mesh(pp=4), Mesh(tp=4), Mesh(pp=2, tp=2), Mesh(pp=2, dp=2)])
def test_a_forced_mesh_is_the_mesh_of_the_plan(mesh) -> None:
    """The caller's mesh wins over a faster one."""
    plan = _plan("4xcpu:1GiB", mesh=mesh, num_microbatches=4).best
    assert plan.mesh == mesh
    assert plan.schedule.num_microbatches == 4
    assert len(plan.stages) == mesh.pp
    assert plan.prediction is not None
    assert len(plan.prediction.memory_by_rank) == 4


@pytest.mark.parametrize("strategy", ["pipeline_parallel", "tensor_parallel", "combined"])
def test_a_forced_strategy_is_the_strategy_of_the_plan(strategy) -> None:
    """The caller's strategy wins over a faster one."""
    assert _plan("4xcpu:1GiB", strategy=strategy).best.strategy == strategy


@pytest.mark.parametrize(
    ("wishes", "part"),
    [
        ({"mesh": Mesh(pp=16), "cluster": "16xcpu:1GiB"}, "16 pipeline stages are more than the model's 8"),
        ({"mesh": Mesh(tp=3)}, "split 3 ways"),
        ({"mesh": Mesh(dp=8)}, "needs 8 devices, the cluster has 4"),
        ({"mesh": Mesh(dp=3)}, "global batch of 15 or 18"),
        ({"num_microbatches": 3}, "2 or 4 micro-batches"),
        ({"global_batch": 0}, "no sample"),
        ({"strategy": "magic"}, "mirrored"),
        ({"precision": "fp31"}, "fp32"),
        ({"optimizer": OptimizerSpec(name="lion")}, "adamw"),
        ({"cuts": ["layers.2"], "mesh": Mesh(pp=4)}, "2 stages"),
    ],
)
def test_a_mistake_is_one_message_with_numbers(wishes, part) -> None:
    """Illegal wishes raise PlanError with the numbers that would be legal."""
    with pytest.raises(PlanError, match=part):
        _plan(**wishes)


def test_when_nothing_fits_the_smallest_change_is_named() -> None:
    """On four devices of 24 MiB the error says what would be enough."""
    with pytest.raises(DoesNotFitError, match=r"Try: (.* devices instead of|devices of|recompute)"):
        _plan("4xcpu:24MiB")


def test_a_forced_strategy_that_does_not_fit_is_an_error_with_its_reason() -> None:
    """Mirrored on 100 MiB devices is refused with the verdict's reason."""
    with pytest.raises(DoesNotFitError, match="more devices do not change that"):
        _plan(strategy="mirrored")


def test_planning_is_deterministic() -> None:
    """Two runs give the same plan and verdicts."""
    assert _plan().best == _plan().best


def test_planning_imports_no_torch() -> None:
    """Judging a described model needs numpy alone."""
    code = (
        "import sys; from outsize.planner.search import plan_job; import outsize.cluster.argument;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
