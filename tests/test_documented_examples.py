"""The example of the first page works as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.processes import run_distributed
from outsize.jobs.planning import PlanRequest, find_plan
from outsize.model.argument import load_model
from outsize.plan.plan import Mesh, Plan
from outsize.runtime.parallelize import parallelize

README = Path(__file__).parents[1] / "README.md"


def train(_rank: int, model: str, plan: Plan) -> list[float]:
    source = load_model(model)
    parallel = parallelize(source.factory, plan, sample_batch=source.sample_batch(plan.microbatch_size))
    return [parallel.train_step(source.sample_batch(8)).loss for _ in range(2)]


@pytest.mark.distributed
def test_the_readmes_model_is_planned_and_trained_on_two_processes(tmp_path: Path) -> None:
    """B12: the printed file, cut in two; both ranks know the same loss, and it falls."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def build" in block]
    path = tmp_path / "my_model.py"
    path.write_text(code)
    model = f"{path}:build"
    plan = find_plan(
        PlanRequest(model=model, cluster="2xcpu:256MiB", global_batch=8, mesh=Mesh(pp=2), num_microbatches=2)
    )
    first, second = run_distributed(train, 2, model, plan)
    assert first == second
    assert first[1] < first[0]
