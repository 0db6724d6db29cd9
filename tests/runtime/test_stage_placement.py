"""A plan that recomputes what its stage does not hold is refused when the model is placed."""

from __future__ import annotations

import pytest

from helpers.tiny_language_model import stage_labels, tied_model, token_batch
from outsize.errors import PlanError
from outsize.model.deferred import build_deferred
from outsize.model.program import Program
from outsize.model.record import record_module
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.stage_placement import place_stages


@pytest.fixture(scope="module")
def program() -> Program:
    return record_module(build_deferred(tied_model).module, token_batch(2, seed=0), granularity="blocks")


def _plan(first: str, second: str) -> Plan:
    """Two stages, each of which recomputes one block."""
    cut = stage_labels(2)[1]
    stages = (StageSpec(0, "", recompute=(first,)), StageSpec(1, cut, recompute=(second,)))
    return Plan("pipeline_parallel", Mesh(pp=2), stages, ScheduleSpec(num_microbatches=2), global_batch=4)


def test_blocks_recomputed_by_the_stage_that_holds_them_are_accepted(program: Program) -> None:
    cut = stage_labels(2)[1]
    first = place_stages(_plan("", cut), program, 0, planned_for=program).slices[0].modules[0]
    assert len(place_stages(_plan(first, cut), program, 0).slices) == 2


def test_a_name_of_no_block_and_a_block_of_another_stage_are_refused(program: Program) -> None:
    cut = stage_labels(2)[1]
    first = place_stages(_plan("", cut), program, 0, planned_for=program).slices[0].modules[0]
    with pytest.raises(PlanError, match=r"Stage 0 .*cannot recompute 'no\.such\.block'"):
        place_stages(_plan("no.such.block", cut), program, 0)
    with pytest.raises(PlanError, match=f"Stage 1 .*cannot recompute '{first}'"):
        place_stages(_plan(first, first), program, 0)
