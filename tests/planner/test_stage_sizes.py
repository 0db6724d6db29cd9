"""Stages hold every layer once, fit their own devices, and weigh as little as they can."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.profiles import chain_profile, uniform_block
from helpers.tiny_language_model import tied_model, token_batch
from outsize.cluster.argument import parse_cluster
from outsize.cluster.topology import Cluster
from outsize.cost.blocks import estimate_block_costs
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.memory import estimate_memory
from outsize.cost.step import estimate_step
from outsize.errors import PlanError
from outsize.model.cuts import find_cut
from outsize.model.deferred import DeferredModel, build_deferred
from outsize.model.profile import Amount, ModelProfile
from outsize.model.profiling import profile_recordings, record_for_profile
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.plan.plan import Mesh
from outsize.planner.search import plan_job
from outsize.planner.stages import cut_stages
from outsize.runtime.materialise import names_used
from outsize.units import GIB, MIB


def make_cluster(memory: list[int], speeds: list[float] | None = None) -> Cluster:
    """Return one machine of A10s with these bytes and shares of their speed."""
    cluster = parse_cluster(f"{len(memory)}xA10:24GiB")
    base = cluster.devices[0]
    devices = tuple(
        replace(
            base,
            memory_bytes=size,
            reserve_bytes=0,
            flops_per_s={name: rate * speed for name, rate in base.flops_per_s.items()},
        )
        for size, speed in zip(memory, speeds or [1.0] * len(memory), strict=True)
    )
    return replace(cluster, machines=(replace(cluster.machines[0], devices=devices),))


def weighted_profile(weights: list[float]) -> ModelProfile:
    """Return blocks whose time is their weight alone: nothing else to read, keep or send."""
    blocks = tuple(
        uniform_block(
            index,
            kind=f"weight {weight}",
            forward_flops=Amount(weight * 1e12),
            backward_flops=Amount(2e12 * weight),
            bytes_moved=Amount(0.0),
            output_bytes=Amount(1.0),
        )
        for index, weight in enumerate(weights)
    )
    return ModelProfile("weighted", blocks, tokens_per_sample=64)


def bounds_of(profile: ModelProfile, num_stages: int, *, microbatches: int = 8) -> tuple[int, ...]:
    """Return the cuts for devices that are alike and large."""
    job = Job(profile, make_cluster([24 * GIB] * num_stages), global_batch=8)
    layout = Layout(Mesh(pp=num_stages), 8 // microbatches, microbatches)
    cuts = cut_stages(job, layout, estimate_block_costs(job, layout))
    assert cuts is not None
    assert cuts.fits
    return cuts.assignment.bounds


def sizes_of(bounds: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=4, max_size=8),
    memory=st.lists(st.integers(20, 300), min_size=3, max_size=3),
    speeds=st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=3, max_size=3),
    microbatches=st.sampled_from([1, 2, 8]),
)
def test_cuts_for_unequal_devices_are_the_best_of_all(sizes, memory, speeds, microbatches) -> None:
    """Slow and small devices: of all cuts whose every stage fits its own device, the fastest is found.

    The oracle tries every cut and asks the memory and the time of each, never the planner.
    """
    blocks = tuple(
        uniform_block(
            index,
            kind=f"kind{size}",
            parameters=size * 250_000,
            saved_activation_bytes=Amount(size * 4e5),
        )
        for index, size in enumerate(sizes)
    )
    cluster = make_cluster([each * MIB for each in memory], speeds)
    job = Job(ModelProfile("uneven", blocks, tokens_per_sample=64), cluster, global_batch=8)
    layout = Layout(Mesh(pp=3), 8 // microbatches, microbatches)
    costs = estimate_block_costs(job, layout)
    fastest = None
    for inner in combinations(range(1, len(sizes)), 2):
        assignment = Assignment((0, *inner, len(sizes)), ("none",) * len(sizes))
        needed = np.sum(list(estimate_memory(job, layout, costs, assignment).values()), axis=0)
        if all(need <= device.memory_bytes for need, device in zip(needed, cluster.devices, strict=True)):
            time_s = estimate_step(job, layout, costs, assignment).step_time_s
            fastest = time_s if fastest is None else min(fastest, time_s)
    cuts = cut_stages(job, layout, costs, recompute=False)
    assert cuts is not None
    assert cuts.fits == (fastest is not None)
    if fastest is not None:
        found = estimate_step(job, layout, costs, cuts.assignment).step_time_s
        assert found == pytest.approx(fastest, rel=1e-9)


def test_a_device_of_half_the_speed_gets_half_the_layers() -> None:
    """12 equal layers of pure arithmetic on devices of speed 1, 1/2 and 1/2: six, three and three."""
    profile = weighted_profile([1.0] * 12)
    job = Job(profile, make_cluster([24 * GIB] * 3, [1.0, 0.5, 0.5]), global_batch=64)
    layout = Layout(Mesh(pp=3), 1, 64)
    cuts = cut_stages(job, layout, estimate_block_costs(job, layout))
    assert cuts is not None
    assert sizes_of(cuts.assignment.bounds) == [6, 3, 3]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_no_layer_is_lost_and_no_stage_is_empty(num_stages: int) -> None:
    """B1: L layers on S stages: sizes sum to L (30 on 4: 30, not 28), and the largest is L / S rounded up.

    The first stage may hold fewer than the others: its optimizer is the last to run.
    """
    for num_layers in range(num_stages, 41):
        sizes = sizes_of(bounds_of(weighted_profile([1.0] * num_layers), num_stages))
        assert sum(sizes) == num_layers
        assert min(sizes) >= 1
        assert max(sizes) == -(-num_layers // num_stages)
        assert max(sizes[1:], default=0) - min(sizes[1:], default=0) <= 1


def test_forty_two_blocks_on_sixteen_stages() -> None:
    """B5: two or three blocks each; the first stage, whose optimizer is the last to run, may hold one."""
    sizes = sizes_of(bounds_of(weighted_profile([1.0] * 42), 16))
    assert (min(sizes[1:]), max(sizes[1:]), sum(sizes)) == (2, 3, 42)
    assert sizes[0] >= 1


def test_five_ones_in_four_parts() -> None:
    """B6: the heaviest part is 2."""
    assert max(sizes_of(bounds_of(weighted_profile([1.0] * 5), 4))) == 2


@pytest.mark.parametrize("num_virtual_stages", [2, 3, 4])
def test_virtual_stages_cover_the_layers_once_in_order(num_virtual_stages: int) -> None:
    """B3: over (rank, chunk) the offsets are 0 to L - 1, each once, in the order of execution."""
    for num_layers in range(2 * num_virtual_stages, 17):
        job = Job(chain_profile(num_layers), make_cluster([24 * GIB] * 2), global_batch=8)
        layout = Layout(Mesh(pp=2), 2, 4, "interleaved_1f1b", num_virtual_stages)
        cuts = cut_stages(job, layout, estimate_block_costs(job, layout))
        assert cuts is not None
        held = [block for chunk in range(layout.num_chunks) for block in cuts.assignment.blocks_of(chunk)]
        assert held == list(range(num_layers))
        assert min(sizes_of(cuts.assignment.bounds)) >= 1


def test_one_stage_is_the_whole_model_and_a_wish_for_more_is_refused() -> None:
    """B4: with one device a pinned cut is an error, never a model with fewer layers."""
    profile, cluster = chain_profile(6), make_cluster([24 * GIB])
    (stage,) = plan_job(profile, cluster, global_batch=8).best.stages
    assert len(stage.blocks) == 6
    assert stage.num_parameters == profile.num_parameters
    with pytest.raises(PlanError, match="needs 2 devices"):
        plan_job(profile, cluster, global_batch=8, cuts=["layers.4"])


def test_layers_of_unlike_cost_are_balanced_by_cost() -> None:
    """B7: weights 0,2,0,1,1,1,1,0,0,2,0 on 4 stages weigh 2 each; 10,1,1,1,1,10 on 3 stages at most 10."""
    weights = [0, 2, 0, 1, 1, 1, 1, 0, 0, 2, 0]
    bounds = bounds_of(weighted_profile(weights), 4)
    assert [sum(weights[start:end]) for start, end in pairwise(bounds)] == [2, 2, 2, 2]
    weights = [10, 1, 1, 1, 1, 10]
    bounds = bounds_of(weighted_profile(weights), 3)
    assert max(sum(weights[start:end]) for start, end in pairwise(bounds)) == 10


def test_a_users_cuts_are_honoured_exactly() -> None:
    """B7: cuts at 2 and 6 give blocks 0-1, 2-5 and 6-10, however unbalanced; others are refused near them."""
    profile = chain_profile(11)
    cluster = make_cluster([24 * GIB] * 3)
    plan = plan_job(profile, cluster, global_batch=8, cuts=["layers.2", "layers.6"]).best
    assert plan.mesh == Mesh(pp=3)
    assert [len(stage.blocks) for stage in plan.stages] == [2, 4, 5]
    assert [stage.begins_at for stage in plan.stages] == ["", "layers.2", "layers.6"]
    with pytest.raises(PlanError, match=r"cannot be cut at 'layers.11'[\s\S]*layers.9 or layers.10"):
        plan_job(profile, cluster, global_batch=8, cuts=["layers.2", "layers.11"])
    with pytest.raises(PlanError, match="2 cuts make 3 stages, the mesh has 2"):
        plan_job(profile, cluster, global_batch=8, cuts=["layers.2", "layers.6"], mesh=Mesh(pp=2))


def test_the_end_with_the_large_embedding_gets_fewer_layers() -> None:
    """B8: where the first stage would not fit with its share, layers move away from it, none are dropped."""
    blocks = weighted_profile([1.0] * 9).blocks
    heavy = replace(blocks[0], num_parameters=20_000_000, num_trainable_parameters=0, kind="embedding")
    profile = ModelProfile("heavy", (heavy, *blocks[1:]), tokens_per_sample=64)
    even = plan_job(profile, make_cluster([24 * GIB] * 3), global_batch=8, mesh=Mesh(pp=3)).best
    assert [len(stage.blocks) for stage in even.stages] == [3, 3, 3]
    assert even.prediction is not None
    by_rank = [sum(each.values()) for each in even.prediction.memory_by_rank]
    assert even.prediction.peak_memory_bytes == max(by_rank) == by_rank[0]
    state = [rank["parameters"] + rank["optimizer_states"] for rank in even.prediction.memory_by_rank]
    # fp32 parameters of 4 bytes; AdamW keeps 8 more for each that trains, all but the embedding's
    assert state == [4 * 22_000_000 + 8 * 2_000_000, 12 * 3_000_000, 12 * 3_000_000]
    tight = plan_job(profile, make_cluster([by_rank[0] - MIB] * 3), global_batch=8, mesh=Mesh(pp=3)).best
    assert len(tight.stages[0].blocks) < 3
    assert sum(len(stage.blocks) for stage in tight.stages) == 9


@pytest.fixture(scope="module")
def recorded() -> tuple[DeferredModel, ModelProfile]:
    """A language model of eight blocks whose head shares the embedding, and its profile."""
    deferred = build_deferred(tied_model)
    recordings = record_for_profile(deferred.module, lambda num_samples: token_batch(num_samples, seed=0))
    return deferred, profile_recordings(deferred.module, recordings)


def test_every_parameter_has_one_owner_and_ties_are_listed(
    recorded: tuple[DeferredModel, ModelProfile],
) -> None:
    """The stages of a recorded model own each parameter once; the head's stage lists the tied embedding."""
    deferred, profile = recorded
    plan = plan_job(profile, make_cluster([GIB] * 3), global_batch=12, mesh=Mesh(pp=3)).best
    owned = {block.name: block.parameter_names for block in profile.blocks}
    names = [name for stage in plan.stages for block in stage.blocks for name in owned[block]]
    assert sorted(names) == sorted(name for name, _ in deferred.module.named_parameters())
    assert sum(stage.num_parameters for stage in plan.stages) == profile.num_parameters
    assert [stage.tied for stage in plan.stages] == [(), (), ("embedding.weight",)]


def test_the_predicted_parameters_of_a_stage_are_those_it_holds(
    recorded: tuple[DeferredModel, ModelProfile],
) -> None:
    """B195: for every way to cut the model in three, planned and held parameters agree stage by stage."""
    deferred, profile = recorded
    module = deferred.module
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    program = record_module(module, token_batch(2, seed=0))
    for cuts in combinations([block.cut_label for block in profile.blocks if block.cut_label], 2):
        plan = plan_job(profile, make_cluster([GIB] * 3), global_batch=12, cuts=cuts).best
        parts = slice_program(program, [find_cut(program, cut) for cut in cuts])
        for stage, part in zip(plan.stages, parts, strict=True):
            held = {deferred.ties.get(name, name) for name in names_used(deferred, [part])} & set(sizes)
            planned = stage.num_parameters + sum(sizes[name] for name in stage.tied)
            assert planned == sum(sizes[name] for name in held), (cuts, stage.index)
