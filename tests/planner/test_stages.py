"""Stage cuts against trying every cut."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.profiles import uniform_block
from outsize.cluster.argument import parse_cluster
from outsize.cost.blocks import estimate_block_costs
from outsize.cost.layout import Job, Layout
from outsize.cost.step import estimate_step
from outsize.errors import PlanError
from outsize.model.profile import Amount, ModelProfile
from outsize.plan.plan import Mesh
from outsize.planner.stages import cut_stages, legal_boundaries, pinned_bounds
from outsize.units import MIB


def _profile(sizes: list[int], outputs: list[int], uncut: int | None = None) -> ModelProfile:
    blocks = [
        uniform_block(
            index,
            kind=f"kind{size}-{output}",
            parameters=size * 250_000,
            output_bytes=Amount(output * 4e5),
            saved_activation_bytes=Amount(size * 4e5),
            cut_label="" if index == uncut else f"layers.{index}",
        )
        for index, (size, output) in enumerate(zip(sizes, outputs, strict=True))
    ]
    return ModelProfile("uneven", tuple(blocks), tokens_per_sample=64)


def _by_force(job: Job, layout: Layout, *, recompute: bool) -> float | None:
    """Step time of the best of all cuts that fit."""
    costs = estimate_block_costs(job, layout)
    legal = legal_boundaries(job.profile)
    times = []
    for inner in combinations(legal[1:-1], layout.mesh.pp - 1):
        bounds = (0, *inner, legal[-1])
        cuts = cut_stages(job, layout, costs, recompute=recompute, bounds=bounds)
        if cuts is not None and cuts.fits:
            times.append(estimate_step(job, layout, costs, cuts.assignment).step_time_s)
    return min(times, default=None)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=4, max_size=8),
    outputs=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    stages=st.integers(2, 4),
    microbatches=st.sampled_from([1, 2, 8]),
    memory=st.integers(30, 200),
    uncut=st.one_of(st.none(), st.integers(1, 3)),
)
def test_cuts_are_the_best_of_all(sizes, outputs, stages, microbatches, memory, uncut) -> None:
    """Dynamic programming finds the time of the exhaustive search, under every memory limit."""
    profile = _profile(sizes, outputs[: len(sizes)], uncut)
    cluster = parse_cluster(f"{stages}xA10:24GiB")
    device = replace(cluster.devices[0], memory_bytes=memory * MIB, reserve_bytes=0)
    machine = replace(cluster.machines[0], devices=(device,) * stages)
    job = Job(profile, replace(cluster, machines=(machine,)), global_batch=8)
    layout = Layout(Mesh(pp=stages), 8 // microbatches, microbatches)
    cuts = cut_stages(job, layout, estimate_block_costs(job, layout), recompute=False)
    expected = _by_force(job, layout, recompute=False)
    if len(legal_boundaries(profile)) - 1 < stages:
        assert cuts is None
        return
    assert cuts is not None
    assert cuts.fits == (expected is not None)
    if expected is not None:
        costs = estimate_block_costs(job, layout)
        time = estimate_step(job, layout, costs, cuts.assignment).step_time_s
        assert time == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("memory", range(24, 60, 4))
def test_recompute_is_chosen_where_memory_is_short(memory) -> None:
    """With recomputation the cuts still match trying every cut."""
    profile = _profile([4] * 6, [1] * 6)
    cluster = parse_cluster("2xA10:24GiB")
    device = replace(cluster.devices[0], memory_bytes=memory * MIB, reserve_bytes=0)
    machine = replace(cluster.machines[0], devices=(device,) * 2)
    job = Job(profile, replace(cluster, machines=(machine,)), global_batch=8)
    layout = Layout(Mesh(pp=2), 2, 4)
    costs = estimate_block_costs(job, layout)
    cuts = cut_stages(job, layout, costs, recompute=True)
    expected = _by_force(job, layout, recompute=True)
    assert cuts is not None
    assert cuts.fits == (expected is not None)
    if expected is not None:
        assert estimate_step(job, layout, costs, cuts.assignment).step_time_s == pytest.approx(expected)


def test_pinned_cuts_are_honoured_and_unknown_ones_refused() -> None:
    """Labels give bounds; a wrong label or order is one message."""
    profile = _profile([1] * 4, [1] * 4)
    assert pinned_bounds(profile, ["layers.1", "layers.3"]) == (0, 1, 3, 4)
    with pytest.raises(PlanError, match=r"layers\.9"):
        pinned_bounds(profile, ["layers.9"])
    with pytest.raises(PlanError, match="order"):
        pinned_bounds(profile, ["layers.3", "layers.1"])
