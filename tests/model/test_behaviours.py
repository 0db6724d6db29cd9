"""Random numbers, state, frozen parts, mixed dtypes and recomputation, whole against sliced."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.modules import Casting
from model.tiny_models import build, gpt2, llama, token_ids
from outsize.model.cuts import cut_points
from outsize.model.program import Program
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule
from sliced_run import run_sliced, run_whole, worst_relative_error

X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8)


def assert_same_everywhere(module: nn.Module, batch: Any, *, num_cuts: int | None = None) -> Program:
    """Cut a copy of ``module`` at every legal place: loss and gradients are the whole model's."""
    torch.manual_seed(1)
    loss, expected = run_whole(copy.deepcopy(module), batch)
    program = record_module(module, batch)
    cuts = cut_points(program)
    assert cuts
    assert num_cuts is None or len(cuts) == num_cuts
    for cut in cuts:
        torch.manual_seed(1)
        found_loss, found, _ = run_sliced(program, [cut.node_index], copy.deepcopy(module), batch)
        assert found_loss == pytest.approx(loss, rel=1e-12), cut.label
        assert worst_relative_error(found, expected) < 1e-12, cut.label
    return program


class Stack(nn.Module):
    """Four blocks and a mean square."""

    def __init__(self, make_block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_block(index) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.double().square().mean()


def stack_of(make_block: Callable[[int], nn.Module]) -> nn.Module:
    return build(lambda: Stack(make_block))


class StochasticDepth(nn.Module):
    """Drops its residual branch for a sample with probability one half."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape[0], 1) < 0.5
        return x + torch.tanh(self.linear(x)) * kept * 2


@pytest.mark.parametrize(
    "make_block",
    [
        lambda _: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        lambda _: StochasticDepth(),
    ],
)
def test_masks_are_the_whole_models_for_the_same_seed(make_block) -> None:
    """Dropout and stochastic depth draw in the same order when stages run one after another."""
    assert_same_everywhere(stack_of(make_block), (X,), num_cuts=3)


def test_masks_between_blocks_are_drawn_once_and_sent() -> None:
    """A mask that two blocks share is random, so it is never recomputed by a second stage."""

    class SharedMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.rand_like(x) < 0.5
            return ((self.second(self.first(x) * mask)) * mask).square().mean()

    program = assert_same_everywhere(build(SharedMask), (X,), num_cuts=1)
    (cut,) = cut_points(program)
    assert torch.bool in {program.specs[value].dtype for value in cut.crossing}


def test_gpt2_with_its_dropouts() -> None:
    """A whole model with dropout of embeddings, attention and residuals."""
    module, batch = gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    assert_same_everywhere(module, batch)


def test_batch_norm_counts_once_a_pass() -> None:
    """Row B193: running statistics and the counter move once for each pass of a micro-batch."""
    module = stack_of(lambda _: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    assert_same_everywhere(module, (X,), num_cuts=3)
    whole, sliced = copy.deepcopy(module), copy.deepcopy(module)
    run_whole(whole, (X,))
    program = record_module(module, (X,))
    run_sliced(program, [cut_points(program)[1].node_index], sliced, (X,))
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(sliced.named_buffers())[name], buffer), name
    assert module.blocks[0][1].num_batches_tracked.item() == 0


class Counter(nn.Module):
    """Counts its calls in a buffer between blocks and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.calls += 1
        return (self.second(x) * self.calls).square().mean()


def test_a_buffer_written_between_blocks_is_written_by_one_stage() -> None:
    """The count goes up by one for each pass, wherever the cut is."""
    module = build(Counter)
    assert_same_everywhere(module, (X,))
    program = record_module(module, (X,))
    for cut in cut_points(program):
        sliced = copy.deepcopy(module)
        run_sliced(program, [cut.node_index], sliced, (X,))
        assert sliced.calls.item() == 1


def test_frozen_blocks_have_no_gradient() -> None:
    """Row B190: first or last blocks frozen; the others' gradients are exact."""
    for frozen in (0, 3):
        module = stack_of(lambda _: nn.Linear(8, 8))
        module.blocks[frozen].requires_grad_(False)
        assert_same_everywhere(module, (X,), num_cuts=3)


def test_every_low_rank_adapter_gets_its_gradient() -> None:
    """Row B189: a Llama with adapters on all projections; frozen weights have none."""
    peft = pytest.importorskip("peft")
    module, batch = llama()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(module, config).double().train()
    _, expected = run_whole(copy.deepcopy(adapted), batch)
    assert len(expected) == 2 * 2 * 4
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    assert_same_everywhere(adapted, batch)


def test_dtypes_may_change_between_blocks() -> None:
    """Row B183: float32, bfloat16 and float64 blocks; each value crosses a cut in its own dtype."""
    dtypes = [torch.float64, torch.bfloat16, torch.float32, torch.float64]
    program = assert_same_everywhere(stack_of(lambda index: Casting(dtypes[index])), (X,), num_cuts=3)
    sent = [program.specs[cut.crossing[0]].dtype for cut in cut_points(program)]
    assert sent == dtypes[:3]


def test_complex_values_cross_a_cut() -> None:
    """Row B176: a complex table made from a parameter is sent as it is."""

    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angle, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = torch.polar(torch.ones_like(x), self.angle(x))
            y = self.out(x)
            return (turned * y).real.square().mean()

    program = assert_same_everywhere(build(Rotating), (X,))
    assert any(
        program.specs[value].dtype is torch.complex128
        for cut in cut_points(program)
        for value in cut.crossing
    )


class Recomputing(nn.Module):
    """The user's own gradient checkpointing, around each block."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(self.use_reentrant)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_models_own_recomputation_is_recorded_through(use_reentrant: bool) -> None:
    """Row B187, both variants: gradients are exact at every cut."""
    assert_same_everywhere(build(lambda: Recomputing(use_reentrant=use_reentrant)), (X,), num_cuts=3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hugging_face_recomputation_inside_blocks_is_kept(use_reentrant: bool) -> None:
    """Blocks that recompute themselves do so in stages too."""
    module, batch = llama()
    module.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    module.enable_input_require_grads()
    assert_same_everywhere(module, batch)


def test_evaluation_mode_and_no_grad_regions_are_kept() -> None:
    """A part under no_grad stays without gradient; a model in evaluation mode records without dropout."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x).tanh()
            return (self.student(x) - target).square().mean()

    module = build(Teacher)
    assert_same_everywhere(module, (X,))
    assert set(run_whole(module, (X,))[1]) == {"student.weight", "student.bias"}
    evaluated, batch = gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    program = assert_same_everywhere(evaluated.eval(), batch)
    assert not any(node.is_random for node in program.nodes)


def test_under_autocast_stages_compute_as_the_whole_model() -> None:
    """Row B185: blocks and operators in between follow the autocast of whoever runs the stage."""
    module, batch = llama()
    module = module.float()
    program = record_module(module, batch)
    cut = cut_points(program)[2].node_index
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, expected = run_whole(copy.deepcopy(module), batch)
        found_loss, found, _ = run_sliced(program, [cut], copy.deepcopy(module), batch)
    assert found_loss == pytest.approx(loss, rel=1e-2)
    assert found.keys() == expected.keys()


def test_every_stage_has_the_buffers_its_layers_use() -> None:
    """Row B139: rotary tables are on every stage, equal to the unsplit model's."""
    module, batch = llama()
    program = record_module(module, batch)
    whole = dict(module.named_buffers())
    parts = slice_program(program, [cut.node_index for cut in cut_points(program)[1:3]])
    for part in parts[:2]:
        held = dict(StageModule(program, part, module).named_buffers())
        assert held
        assert all(torch.equal(buffer, whole[name]) for name, buffer in held.items())


@pytest.mark.parametrize("num_layers", [1, 5, 7])
def test_no_layer_is_lost_or_repeated(num_layers: int) -> None:
    """Rows B1 and B3: over all stages every parameter is there, layers in order, each exactly once."""
    module = build(lambda: Stack(lambda _: nn.Linear(8, 8)))
    module.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(num_layers))
    program = record_module(module, (X,))
    positions = [cut.node_index for cut in cut_points(program)]
    assert len(positions) == num_layers - 1
    for num_stages in range(1, num_layers + 1):
        parts = slice_program(program, positions[: num_stages - 1])
        held = [name for part in parts for name in part.modules]
        assert held == [f"blocks.{index}" for index in range(num_layers)]


def test_a_stage_without_parameters_is_no_legal_cut() -> None:
    """Row B9: a middle made of activations alone belongs to a neighbour; no stage is empty."""
    module = build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.ReLU(), nn.Linear(8, 1)))
    program = record_module(module, (X,))
    assert [cut.label for cut in cut_points(program)] == ["3"]


def test_values_are_dropped_after_their_last_use() -> None:
    """Rows B171 and B172: a stage holds nothing between calls."""
    module, batch = llama()
    program = record_module(module, {"input_ids": token_ids(), "labels": token_ids(seed=1)})
    first, _ = slice_program(program, [cut_points(program)[1].node_index])
    stage = StageModule(program, first, module)
    sent = stage(**{name: batch[name] for name in first.batch_entries})
    sizes = [value.untyped_storage().nbytes() for value in sent]
    del sent
    again = stage(**{name: batch[name] for name in first.batch_entries})
    assert [value.untyped_storage().nbytes() for value in again] == sizes
    assert not any(isinstance(value, torch.Tensor) for value in vars(stage).values())
