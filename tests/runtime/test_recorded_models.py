"""Recorded models on real processes: gradients of one process, and no byte more than was predicted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from helpers.models import reference_model
from helpers.processes import run_distributed
from outsize.model.batch_entries import flatten_batch
from outsize.model.profiling import profile_recordings, record_for_profile
from outsize.model.program import Program
from outsize.model.record import loss_tensor, record_module
from outsize.model.source import resize_batch
from runtime.recorded_models import Case, Outcome, build, make_batch, make_plan, run_case

pytestmark = pytest.mark.distributed

TRANSFORMER_CUTS = ("transformer.encoder.layers.1", "transformer.decoder.layers.0", "head")
TWO_RANKS = [
    Case("alternating_branch", ("layers.2",)),  # B11
    Case("nn_transformer", ("transformer.decoder.layers.0",)),  # B13
    Case("nn_transformer", TRANSFORMER_CUTS, 4, "zb_v"),  # B15
    Case("dict_to_dataclass", ("blocks.1",)),  # B174
    Case("dlrm", ("tables.a",)),
    Case("lstm", ("second",), 4),
    Case("many_kinds", ("out",)),  # B175, B176, B191
    Case("adapted", ("blocks.2",), recompute=True),  # B187, B189
    Case("shared_sum", ("blocks.1",)),  # B20
    Case("bfloat16", ("blocks.1",), 1),  # B184
]  # fmt: skip
FOUR_RANKS = [
    Case("nn_transformer", TRANSFORMER_CUTS, 4),  # B13
    Case("deep_equilibrium", ("block.2", "block.0#3", "block.2#5")),
    Case("diffusion_unet", ("down.1", "middle", "up.1")),
    Case("long_skip", ("blocks.0", "blocks.1", "blocks.2"), 4),
    Case("mixed_dtypes", ("blocks.1", "blocks.2", "blocks.3"), 1),  # B183
    Case("lonely_ends", ("block.0", "block.2", "head")),  # B9
]  # fmt: skip


def run_all(_rank: int, cases: list[Case]) -> list[Outcome]:
    return [run_case(case) for case in cases]


def run_on(num_ranks: int, cases: list[Case]) -> dict[Case, list[Outcome]]:
    results = run_distributed(run_all, num_ranks, cases, timeout_s=100)
    return dict(zip(cases, zip(*results, strict=True), strict=True))


@pytest.fixture(scope="module")
def on_two() -> dict[Case, list[Outcome]]:
    return run_on(2, TWO_RANKS)


@pytest.fixture(scope="module")
def on_four() -> dict[Case, list[Outcome]]:
    return run_on(4, FOUR_RANKS)


def one_process(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = reference_model(partial(build, name))
    entries, layout = flatten_batch(make_batch(name))
    args, kwargs = layout.restore(entries)
    loss = loss_tensor(model(*args, **kwargs))
    assert loss is not None
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_like_one_process(case: Case, outcomes: list[Outcome]) -> None:
    loss, expected = one_process(case.name)
    norm = float(
        torch.stack([gradient.double().square().sum() for gradient in expected.values()]).sum().sqrt()
    )
    is_double = all(gradient.dtype is torch.float64 for gradient in expected.values())
    precision = 1e-10 if is_double else 1e-7  # norms of rows are in single precision at least
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(loss, rel=1e-12)
        assert outcome.norm == pytest.approx(norm, rel=precision)
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)
    assert {name for outcome in outcomes for name in outcome.gradients} == set(expected)


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: f"{case.name}-{len(case.cuts) + 1}")
def test_two_ranks_have_the_gradients_of_one(case: Case, on_two: dict[Case, list[Outcome]]) -> None:
    """The rows named above; and every rank knows the loss and the norm."""
    assert_like_one_process(case, on_two[case])


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: case.name)
def test_four_ranks_have_the_gradients_of_one(case: Case, on_four: dict[Case, list[Outcome]]) -> None:
    """The rows named above: a lonely table, values for several later stages, mixed dtypes."""
    assert_like_one_process(case, on_four[case])


def test_the_norm_counts_a_shared_weight_once(on_two: dict[Case, list[Outcome]]) -> None:
    """Row B20: 200 elements with gradient 1 + 1: the square root of 800, not of 1600."""
    (case,) = [case for case in TWO_RANKS if case.name == "shared_sum"]
    assert [outcome.norm for outcome in on_two[case]] == pytest.approx([28.284271247461902] * 2, rel=1e-12)


def test_every_adapter_has_a_gradient_behind_frozen_recomputed_blocks(
    on_two: dict[Case, list[Outcome]],
) -> None:
    """Rows B187, B189: 8 adapter matrices, 8 gradients, none of them zero; none for frozen weights."""
    (case,) = [case for case in TWO_RANKS if case.name == "adapted"]
    gradients = {name: g for outcome in on_two[case] for name, g in outcome.gradients.items()}
    assert len(gradients) == 8
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def microbatch_program(case: Case) -> Program:
    batch = resize_batch(make_batch(case.name), 4 // case.num_microbatches)
    return record_module(build(case.name), batch)


def expected_bytes(case: Case) -> list[tuple[int, int]]:
    """Return, for each cut, what a micro-batch sends forward, and what of it has a gradient to send back."""
    program = microbatch_program(case)
    sent = [stage.part.sent for stage in _stages(program, case)[:-1]]
    specs = [[program.specs[value] for value in values] for values in sent]
    return [
        (
            sum(spec.num_bytes for spec in crossing),
            sum(spec.num_bytes for spec in crossing if spec.requires_grad),
        )
        for crossing in specs
    ]


def _stages(program: Program, case: Case) -> list[Any]:
    from outsize.model.cuts import find_cut
    from outsize.model.slice import slice_program
    from outsize.model.stage_module import StageModule

    parts = slice_program(program, [find_cut(program, label) for label in case.cuts])
    module = build(case.name)
    return [StageModule(program, part, module) for part in parts]


@pytest.mark.parametrize("case", [*FOUR_RANKS, *(each for each in TWO_RANKS if len(each.cuts) == 1)],
                         ids=lambda case: f"{case.name}-{len(case.cuts) + 1}")  # fmt: skip
def test_what_is_sent_is_what_crosses_the_cut(
    case: Case, on_two: dict[Case, list[Outcome]], on_four: dict[Case, list[Outcome]]
) -> None:
    """Every byte sent, forward and backward, over every cut, is one that the recording has there."""
    outcomes = on_four[case] if case in on_four else on_two[case]
    for rank, (forward, backward) in enumerate(expected_bytes(case)):
        assert outcomes[rank].sent_bytes[rank + 1] == case.num_microbatches * forward
        assert outcomes[rank + 1].sent_bytes.get(rank, 0) == case.num_microbatches * backward
    assert set(outcomes[0].sent_bytes) <= {1}
    assert all(set(outcome.sent_bytes) <= {rank - 1, rank + 1} for rank, outcome in enumerate(outcomes))


@pytest.mark.parametrize(
    "case",
    [case for case in (*TWO_RANKS, *FOUR_RANKS) if case.name in ("long_skip", "lstm", "adapted")],
    ids=lambda case: case.name,
)
def test_the_profile_has_the_bytes_that_a_run_sends(
    case: Case, on_two: dict[Case, list[Outcome]], on_four: dict[Case, list[Outcome]]
) -> None:
    """A block's output bytes for a micro-batch's samples are what the stage that ends with it sends."""
    outcomes = on_four[case] if case in on_four else on_two[case]
    batch = make_batch(case.name)
    module = build(case.name)
    profile = profile_recordings(module, record_for_profile(module, partial(resize_batch, batch)))
    labels = [block.cut_label for block in profile.blocks]
    for rank, label in enumerate(case.cuts):
        predicted = profile.blocks[labels.index(label) - 1].output_bytes.of(4 / case.num_microbatches)
        assert outcomes[rank].sent_bytes[rank + 1] == case.num_microbatches * predicted


def test_a_value_needed_two_stages_later_is_handed_on(on_four: dict[Case, list[Outcome]]) -> None:
    """The plan says so, and all later cuts carry it: 24 + 24 numbers of 8 bytes a sample."""
    (case,) = [case for case in FOUR_RANKS if case.name == "long_skip"]
    assert make_plan(case, 4).skip_connections == "passed_through"
    sent = [outcome.sent_bytes.get(rank + 1) for rank, outcome in enumerate(on_four[case])]
    # before the first block the skipped value is the hidden state itself
    assert sent == [4 * 24 * 8, 4 * 2 * 24 * 8, 4 * 2 * 24 * 8, None]
