"""Live bytes of real pipeline ranks against what is predicted from shapes, and nothing kept too long."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.processes import run_distributed
from helpers.stage_memory import peak_bytes_by_rank, stage_memory
from outsize.cluster.argument import parse_cluster
from outsize.cost.blocks import estimate_block_costs
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.memory import estimate_memory
from outsize.model.cost_meter import CostMeter
from outsize.model.deferred import build_deferred
from outsize.model.profile import ModelProfile
from outsize.model.profiling import profile_model
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.source import ModelSource
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.plan.schedule_memory import peak_microbatches_in_flight
from outsize.plan.schedules import make_schedule
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

NUM_LAYERS, NUM_MICROBATCHES, MICROBATCH_SIZE = 8, 6, 2
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2}  # virtual stages


def llama() -> nn.Module:
    """Return a Llama whose activations are megabytes, in float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 160, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=NUM_LAYERS, use_cache=False)
    return LlamaForCausalLM(config)


def make_batch(num_samples: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(num_samples * 64).view(num_samples, 64) % 160
    return {"input_ids": tokens, "labels": tokens}


def cuts(num_stages: int) -> list[str]:
    return [f"model.layers.{index * NUM_LAYERS // num_stages}" for index in range(1, num_stages)]


def make_model(name: str) -> Any:
    num_virtual = SCHEDULES[name]
    labels = ["", *cuts(2 * num_virtual)]
    plan = Plan(
        "pipeline_parallel",
        Mesh(pp=2),
        tuple(StageSpec(index, label) for index, label in enumerate(labels)),
        ScheduleSpec(name, NUM_MICROBATCHES, num_virtual),
        NUM_MICROBATCHES * MICROBATCH_SIZE,
    )
    return parallelize(llama, plan, sample_batch=make_batch(plan.global_batch))


def measure(_rank: int) -> dict[str, tuple[int, int]]:
    """Return, by schedule, the highest bytes in a step beyond parameters and gradients, and those after."""
    found = {}
    for name in SCHEDULES:
        model = make_model(name)
        split = model._splitter.split(make_batch(NUM_MICROBATCHES * MICROBATCH_SIZE)).accumulation_steps[0]
        executor = model.executions.executor([each.placement for each in split])
        inputs = [each.inputs for each in split]
        executor.train(inputs)  # makes the gradients
        gc.collect()
        gc.disable()  # nothing may depend on it
        with CostMeter() as meter:
            executor.train(inputs)
        gc.enable()
        found[name] = (meter.peak_bytes, meter.live_bytes)
    return found


@pytest.fixture(scope="module")
def measured() -> list[dict[str, tuple[int, int]]]:
    return run_distributed(measure, 2, timeout_s=100)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(ModelSource("llama", lambda: (llama(), make_batch(2)), make_batch))


@pytest.mark.parametrize("name", SCHEDULES)
def test_peak_of_each_rank_is_what_shapes_predict(name: str, measured: list[dict[str, Any]]) -> None:
    """B200: within 3% on every rank, from activations in flight, the action running, and posted receives."""
    module = build_deferred(llama).module
    entries = make_batch(MICROBATCH_SIZE)
    program = record_module(module, entries)
    labels = cuts(2 * SCHEDULES[name])
    points = {point.label: point.node_index for point in program.cut_points()}
    parts = slice_program(program, [points[label] for label in labels])
    stages = [stage_memory(program, part, module, entries) for part in parts]
    schedule = make_schedule(name, num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    peaks = [by_rank[name][0] for by_rank in measured]
    assert peaks == pytest.approx(peak_bytes_by_rank(schedule, stages), rel=0.03)


@pytest.mark.parametrize("name", SCHEDULES)
def test_peak_of_each_rank_is_what_plans_predict(
    name: str, measured: list[dict[str, Any]], profile: ModelProfile
) -> None:
    """The planner's categories, summed over blocks: within 3% on every rank."""
    num_stages = 2 * SCHEDULES[name]
    layout = Layout(Mesh(pp=2), MICROBATCH_SIZE, NUM_MICROBATCHES, name, SCHEDULES[name])
    job = Job(profile, parse_cluster("2xA10"), NUM_MICROBATCHES * MICROBATCH_SIZE)
    labels = [block.cut_label for block in profile.blocks]
    bounds = (0, *(labels.index(cut) for cut in cuts(num_stages)), len(labels))
    memory = estimate_memory(
        job, layout, estimate_block_costs(job, layout), Assignment(bounds, ("none",) * len(labels))
    )
    predicted = sum(memory[key] for key in ("activations", "temporaries", "communication_buffers"))
    assert [by_rank[name][0] for by_rank in measured] == pytest.approx(list(predicted), rel=0.03)


def test_nothing_is_kept_over_steps(measured: list[dict[str, Any]]) -> None:
    """B172: losses, outputs and inputs of a step are gone after it, without the garbage collector."""
    for by_rank in measured:
        assert {name: kept for name, (_, kept) in by_rank.items() if kept > 64} == {}


def test_1f1b_keeps_no_more_for_more_microbatches(measured: list[dict[str, Any]]) -> None:
    """B171: two micro-batches in flight on the first rank and one on the last, of six; GPipe has all."""
    assert peak_microbatches_in_flight(make_schedule("1f1b", num_ranks=2, num_microbatches=6)) == (2, 1)
    assert measured[0]["gpipe"][0] > 2.5 * measured[0]["1f1b"][0]
    assert measured[0]["1f1b"][0] > 1.5 * measured[1]["1f1b"][0]


def hook_calls(_rank: int) -> list[int]:
    """Return how often hooks on what each micro-batch receives have run, after each of three steps."""
    model, counts, calls = make_model("1f1b"), [], [0]
    batch = make_batch(NUM_MICROBATCHES * MICROBATCH_SIZE)
    model.compute_gradients(batch)
    (executor,) = model.executions._executors.values()
    for stage in executor._runtime._stages:
        stage.submod.register_forward_pre_hook(lambda _, received: _count_gradients(received, calls))
    for _ in range(3):
        model.compute_gradients(batch)
        counts.append(calls[0])
    return counts


def _count_gradients(received: tuple[torch.Tensor, ...], calls: list[int]) -> None:
    def count(_: torch.Tensor) -> None:
        calls[0] += 1

    for tensor in received:
        if tensor.requires_grad:
            tensor.register_hook(count)


def test_received_tensors_are_new_for_each_microbatch() -> None:
    """B168: a hook on what is received runs once a micro-batch, in every step."""
    first, last = run_distributed(hook_calls, 2)
    assert first == [0, 0, 0]
    assert last == [NUM_MICROBATCHES, 2 * NUM_MICROBATCHES, 3 * NUM_MICROBATCHES]
