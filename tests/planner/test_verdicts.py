"""Verdicts: what a strategy is said to need, why, and what would change it."""

from dataclasses import replace

import pytest

from helpers.profiles import chain_profile, uniform_block
from outsize.cluster.argument import parse_cluster
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.memory import estimate_memory
from outsize.model.profile import Amount, ModelProfile
from outsize.plan.plan import Mesh
from outsize.planner.evaluate import Evaluator
from outsize.planner.search import plan_job
from outsize.strategies.base import ALL_LAYOUTS


def _verdicts(profile: ModelProfile, cluster: str, batch: int = 16, **wishes):
    result = plan_job(profile, parse_cluster(cluster, num_cores=2), global_batch=batch, **wishes)
    return {verdict.name: verdict for verdict in result.verdicts}


def test_uneven_stages_are_counted_and_not_averaged() -> None:
    """Known failure B195: 9,952 parameters on the larger stage, where a mean of stages gave 6,792."""
    blocks = (
        uniform_block(0, kind="large", parameters=9_952),
        uniform_block(1, kind="small", parameters=3_632),
    )
    job = Job(ModelProfile("uneven", blocks), parse_cluster("2xA10"), 8)
    layout = Layout(Mesh(pp=2), 1, 8)
    costs = Evaluator(job).costs(layout)
    memory = estimate_memory(job, layout, costs, Assignment((0, 1, 2), ("none", "none")))
    assert memory["parameters"].tolist() == [9_952 * 4, 3_632 * 4]


def test_a_v_shaped_schedule_holds_embedding_and_head_on_one_rank() -> None:
    """Known failure B199: under ZB-V rank 0 holds the first and the last chunk."""
    blocks = tuple(
        uniform_block(index, kind=f"k{index}", parameters=size)
        for index, size in enumerate([50_000, 10_000, 10_000, 70_000])
    )
    job = Job(ModelProfile("vee", blocks), parse_cluster("2xA10"), 8)
    layout = Layout(Mesh(pp=2), 1, 8, schedule="zb_v", num_virtual_stages=2)
    costs = Evaluator(job).costs(layout)
    memory = estimate_memory(job, layout, costs, Assignment((0, 1, 2, 3, 4), ("none",) * 4))
    assert memory["parameters"].tolist() == [120_000 * 4, 20_000 * 4]


def test_memory_differs_by_rank_and_by_schedule() -> None:
    """Known failure B200: 1F1B keeps p - i micro-batches on rank i, GPipe all m, interleaved more."""
    job = Job(chain_profile(8), parse_cluster("4xA10"), 8)
    kept = {}
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)):
        layout = Layout(Mesh(pp=4), 1, 8, schedule=schedule, num_virtual_stages=virtual)
        costs = Evaluator(job).costs(layout)
        bounds = tuple(range(0, 9, 2 // virtual))
        memory = estimate_memory(job, layout, costs, Assignment(bounds, ("none",) * 8))
        kept[schedule] = memory["activations"].tolist()
    block = 4e5
    assert kept["gpipe"] == [8 * 2 * block] * 4
    assert kept["1f1b"] == [count * 2 * block for count in (4, 3, 2, 1)]
    # 2 (p - i - 1) + (v - 1) p + 1 chunks of one block each
    assert kept["interleaved_1f1b"] == [count * block for count in (11, 9, 7, 5)]


def test_a_faster_schedule_is_not_chosen_where_it_does_not_fit() -> None:
    """Known failure B201: interleaving is faster and needs more; a limit between the two excludes it."""
    profile = chain_profile(
        8,
        forward_flops=Amount(1e12),
        backward_flops=Amount(2e12),
        saved_activation_bytes=Amount(64e6),
        recompute_input_bytes=Amount(64e6),
    )
    cluster = parse_cluster("4xA10")
    schedules = ("1f1b", "interleaved_1f1b")
    fixed = replace(ALL_LAYOUTS, schedules=schedules, allows_recompute=False, num_microbatches=8)
    needed = {}
    for virtual in (1, 2):
        space = replace(fixed, max_virtual_stages=virtual)
        plan = plan_job(profile, cluster, global_batch=8, mesh=Mesh(pp=4), space=space).best
        needed[virtual] = plan.prediction.peak_memory_bytes
        assert plan.schedule.num_virtual_stages == virtual
    between = (needed[1] + needed[2]) // 2
    device = replace(cluster.devices[0], memory_bytes=between)
    limited = replace(cluster, machines=(replace(cluster.machines[0], devices=(device,) * 4),))
    space = replace(fixed, max_virtual_stages=2)
    plan = plan_job(profile, limited, global_batch=8, mesh=Mesh(pp=4), space=space).best
    assert plan.schedule.num_virtual_stages == 1


def test_logits_of_a_large_vocabulary_are_counted() -> None:
    """Known failure B196: float32 logits, 4 bytes x vocabulary x tokens, are in the head's activations."""
    from outsize.model.transformer_profile import TransformerConfig, transformer_profile

    sizes = {"num_layers": 2, "hidden": 64, "num_heads": 4, "sequence": 1024}
    small = transformer_profile(TransformerConfig("small", vocab=1_000, **sizes)).blocks[-1]
    large = transformer_profile(TransformerConfig("large", vocab=151_000, **sizes)).blocks[-1]
    more = large.saved_activation_bytes.of(2) - small.saved_activation_bytes.of(2)
    assert more == pytest.approx(4 * 150_000 * 1024 * 2)


def test_activations_that_do_not_fit_are_told_from_state_that_does_not() -> None:
    """Four blocks that keep 30 MB a sample do not fit 150 MiB, though their state of 61 MiB does."""
    profile = chain_profile(4, saved_activation_bytes=Amount(3e7), recompute_input_bytes=Amount(1e6))
    verdict = _verdicts(profile, "4xcpu:150MiB", strategy="pipeline_parallel")["mirrored"]
    assert verdict.reason_code == "ACT_TOO_BIG"
    assert verdict.smallest_change.startswith("recompute the activations of")


def test_a_block_larger_than_a_device_is_said_to_be_the_trouble() -> None:
    """One block of 40 M parameters needs 305 MiB for parameters and gradients; devices have 256 MiB."""
    blocks = (
        uniform_block(0),
        uniform_block(
            1,
            kind="huge",
            parameters=40_000_000,
            num_largest_parameter=1_000_000,
            max_tensor_parallel_degree=4,
        ),
        uniform_block(2),
        uniform_block(3),
    )
    verdicts = _verdicts(ModelProfile("huge", blocks, tokens_per_sample=64), "4xcpu:256MiB")
    assert verdicts["pipeline_parallel"].reason_code == "UNIT_TOO_BIG"
    assert verdicts["fully_sharded"].reason_code == "UNIT_TOO_BIG"
    assert verdicts["tensor_parallel"].fits


def test_a_model_without_cuts_or_splits_says_so() -> None:
    """NOT_A_CHAIN for pipelines and NOT_DIVISIBLE for operators."""
    profile = chain_profile(2, cut_label="", max_tensor_parallel_degree=1)
    verdicts = _verdicts(profile, "4xcpu:1GiB")
    assert verdicts["pipeline_parallel"].reason_code == "NOT_A_CHAIN"
    assert verdicts["tensor_parallel"].reason_code == "NOT_DIVISIBLE"
    assert verdicts["mirrored"].fits


def test_one_device_leaves_nothing_to_split_over() -> None:
    """Everything that needs two devices says ONE_DEVICE; mirrored still fits."""
    verdicts = _verdicts(chain_profile(), "1xcpu:1GiB")
    for name in ("fully_sharded", "pipeline_parallel", "tensor_parallel", "combined"):
        assert verdicts[name].reason_code == "ONE_DEVICE"
    assert verdicts["mirrored"].fits


def test_a_saturated_server_names_the_number_of_workers() -> None:
    """Eight workers pull and push 8 M parameters over 10 Gb/s Ethernet."""
    verdicts = _verdicts(chain_profile(), "4x2xRTX4090", batch=64)
    assert verdicts["parameter_server"].reason_code == "SERVER_SATURATED"
    assert "saturated beyond" in verdicts["parameter_server"].reason


def test_a_slower_device_gets_fewer_blocks(tmp_path) -> None:
    """An RTX 4090 (165 TFLOP/s) and an L4 (121 TFLOP/s): the faster takes more of eight equal blocks."""
    path = tmp_path / "mixed.toml"
    path.write_text(
        '[[machines]]\ndevices = [{kind = "RTX4090"}, {kind = "L4"}]\nlink = "pcie4"\n', encoding="utf-8"
    )
    profile = chain_profile(14, forward_flops=Amount(1e12), backward_flops=Amount(2e12))
    plan = plan_job(
        profile,
        parse_cluster(str(path)),
        global_batch=8,
        precision="bf16",
        mesh=Mesh(pp=2),
        num_microbatches=8,
    ).best
    assert [len(stage.blocks) for stage in plan.stages] == [8, 6]


def test_a_pipeline_with_one_slow_block_is_called_unbalanced() -> None:
    """One block as slow as eight others: the slowest stage takes more than 1.5 times the mean."""
    slow = {"forward_flops": Amount(1.024e9), "backward_flops": Amount(2.048e9)}
    blocks = tuple(uniform_block(index) for index in range(7))
    blocks += (uniform_block(7, kind="slow", max_tensor_parallel_degree=1, **slow),)
    verdicts = _verdicts(ModelProfile("slow", blocks, tokens_per_sample=64), "4xcpu:1GiB")
    assert verdicts["pipeline_parallel"].reason_code == "STAGES_UNBALANCED"


def test_the_peak_is_that_of_a_whole_step_not_of_a_forward() -> None:
    """Known failure B197: loss, gradients and optimizer states count; who would die late is refused early."""
    from outsize.model.transformer_profile import TransformerConfig, transformer_profile

    config = TransformerConfig("large vocabulary", 2, 512, 8, 151_000, 2048, is_gated=True)
    profile = transformer_profile(config)
    job = Job(profile, parse_cluster("1xA100"), global_batch=4, precision="bf16")
    found = Evaluator(job).evaluate(Layout(Mesh(), 4, 1))
    (memory,) = found.estimate.memory
    kept = sum(block.saved_activation_bytes.of(4) for block in profile.blocks)
    logits = 4 * 2048 * 151_000  # of one micro-batch
    assert memory["activations"] == pytest.approx(kept)
    assert kept > 4 * logits  # in float32, kept until backward
    assert memory["temporaries"] >= 2 * logits  # and their gradient in 16 bits
    assert memory["gradients"] + memory["optimizer_states"] == pytest.approx(14 * profile.num_parameters)
    tensors = sum(memory.values()) - memory["reserve"]
    tight = replace(job, cluster=parse_cluster(f"1xA100:{tensors // 2**20}MiB"))
    assert not Evaluator(tight).evaluate(Layout(Mesh(), 4, 1)).fits
