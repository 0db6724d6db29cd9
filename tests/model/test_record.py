"""What recording keeps, guards and refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coverage_families import FAMILIES
from helpers.modules import DoubledGradient
from model.tiny_models import gpt2, llama
from outsize.errors import RecordingError
from outsize.model.cuts import cut_points, find_cut
from outsize.model.guards import broken_guards
from outsize.model.program import NodeKind, Rung
from outsize.model.record import record_module
from sliced_run import run_sliced, run_whole, worst_relative_error

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


class Two(nn.Module):
    """Two layers; a test says what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)

    def between(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x), lengths)).square().mean()


class ReadsBatch(Two):
    def between(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[:, : int(lengths.max())].repeat(1, 4)[:, :4]


class ReadsParameters(Two):
    def between(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class SelectsRows(Two):
    def between(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[lengths > 2]


LENGTHS = torch.tensor([1, 3, 2, 3, 1, 3])


def test_a_number_read_from_the_batch_is_guarded_with_its_line() -> None:
    """The recording says where it was read and notices a batch that gives another one."""
    program = record_module(ReadsBatch(), {"x": X, "lengths": LENGTHS})
    (guard,) = program.guards
    assert guard.expected == 3
    assert "test_record.py:" in guard.source
    assert broken_guards(program, {"x": X, "lengths": LENGTHS.flip(0)}) == []
    (broken,) = broken_guards(program, {"x": X, "lengths": LENGTHS + 1})
    assert "read 3 when recorded, 4 from this batch" in broken


def test_a_size_decided_by_the_batch_is_guarded() -> None:
    """Boolean selection by the batch is recorded with the selected number of rows."""
    program = record_module(SelectsRows(), {"x": X, "lengths": LENGTHS})
    assert program.rung is Rung.FAKE_TENSORS
    assert [guard.expected for guard in program.guards] == [3]
    assert broken_guards(program, {"x": X, "lengths": LENGTHS}) == []
    assert broken_guards(program, {"x": X, "lengths": LENGTHS * 0})


def test_a_number_that_depends_on_parameters_is_refused_with_its_line() -> None:
    """It changes while training, so it cannot be baked in, recorded on real tensors or not."""
    for module in (ReadsParameters(), ReadsParameters().to("meta")):
        with pytest.raises(RecordingError, match=r"takes a number from a tensor at .*test_record.py:\d+"):
            record_module(module, {"x": X, "lengths": LENGTHS})


def test_a_number_from_a_batch_without_values_is_refused() -> None:
    """A batch on the meta device cannot decide anything; the message asks for values."""
    batch = {"x": X.to("meta"), "lengths": LENGTHS.to("meta")}
    with pytest.raises(RecordingError, match="give a sample batch with values"):
        record_module(ReadsBatch(), batch)


@torch.library.custom_op("outsize_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    """An operator without a shape function."""
    return x / 2


halve.register_autograd(lambda _, gradient: gradient / 2)


class Foreign(Two):
    def between(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return halve(x)


def test_operators_without_shapes_are_recorded_on_real_tensors() -> None:
    """The second rung is taken, said, and as exact; without values there is only the error."""
    module, batch = Foreign(), {"x": X, "lengths": LENGTHS}
    program = record_module(module, batch)
    assert program.rung is Rung.REAL_TENSORS
    assert "recorded on real tensors" in program.warnings[0]
    loss, expected = run_whole(module, batch)
    (cut,) = cut_points(program)
    found_loss, found, _ = run_sliced(program, [cut.node_index], module, batch)
    assert found_loss == loss
    assert worst_relative_error(found, expected) == 0
    with pytest.raises(RecordingError):
        record_module(Foreign().to("meta"), batch)


def test_recording_on_real_tensors_changes_nothing() -> None:
    """Buffers and the random stream are as before."""

    class Normed(Foreign):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

        def between(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.norm(halve(x)), 0.5)

    module = Normed()
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    assert record_module(module, {"x": X, "lengths": LENGTHS}).rung is Rung.REAL_TENSORS
    assert torch.equal(torch.rand(2), expected)
    assert module.norm.num_batches_tracked.item() == 0
    assert module.norm.running_mean.tolist() == [0, 0, 0, 0]


def test_caches_for_generating_text_are_off_while_recording() -> None:
    """Hugging Face models record the same with use_cache on, and the setting is as before."""
    for make in (llama, gpt2):
        module, batch = make(use_cache=True)
        program = record_module(module, batch)
        assert module.config.use_cache is True
        module.config.use_cache = False
        loss, expected = run_whole(module, batch)
        found_loss, found, _ = run_sliced(program, [cut_points(program)[2].node_index], module, batch)
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert worst_relative_error(found, expected) < 1e-12


def test_the_causal_mask_is_left_to_the_attention_kernel() -> None:
    """As in an ordinary run: no mask of all pairs of positions, unless the batch has a mask of its own."""
    module, batch = llama()
    program = record_module(module, batch)
    pairs = 10 * 10
    assert not any(
        spec.dtype is torch.bool and spec.shape[-2:] == (10, 10) for spec in program.specs.values()
    )
    assert program.guards == ()
    mask = torch.ones(4, 10, dtype=torch.long)
    padded = record_module(module, {**batch, "attention_mask": mask})
    assert any(spec.dtype is torch.bool and spec.num_bytes >= pairs for spec in padded.specs.values())
    assert padded.guards == ()


def test_recording_needs_no_memory_and_leaves_the_module_alone() -> None:
    """A module on the meta device records the same nodes; parameters are the same objects afterwards."""
    family = FAMILIES["gpt2"]
    module = family.build()
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    program = record_module(module, family.batch())
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == before
    on_meta = record_module(family.build().to("meta"), family.batch())
    assert [str(node.target) for node in on_meta.nodes] == [str(node.target) for node in program.nodes]


class SideChannel(nn.Module):
    """Blocks leave a value on an object that the loss reads."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + torch.tanh(self.inner(x))
            self.penalty = x.square().mean()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SideChannel.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean() + sum(block.penalty for block in self.blocks)


def test_values_that_leave_blocks_by_a_side_channel_are_followed() -> None:
    """Such blocks are opened, so that auxiliary losses kept on modules get their gradients."""
    family = replace(FAMILIES["llama"], factory=SideChannel, make_batch=lambda: (X,))
    module = family.build()
    program = record_module(module, (X,))
    assert {node.target for _, node in program.nodes_of_kind(NodeKind.MODULE)} == {
        f"blocks.{index}.inner" for index in range(4)
    }
    loss, expected = run_whole(module, (X,))
    for cut in cut_points(program):
        found_loss, found, _ = run_sliced(program, [cut.node_index], module, (X,))
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert worst_relative_error(found, expected) < 1e-12


class Cache:
    """An object that blocks write to."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Remembering(nn.Module):
    """Hands a cache from block to block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.seen.append(x)
            return self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x.sum()


def test_objects_that_blocks_write_tensors_to_are_refused() -> None:
    """A stage could not call the block again with the object of the recording; the class is named."""
    with pytest.raises(RecordingError, match="passes a Cache that holds tensors"):
        record_module(Remembering().to("meta"), (X.to("meta"),))


class CustomBackward(Two):
    def between(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return DoubledGradient.apply(x)


@pytest.mark.parametrize("granularity", ["blocks", "operators"])
def test_custom_autograd_functions_keep_their_backward(granularity: str) -> None:
    """Row B191: a function between blocks is one node; gradients are as of the whole model."""
    module, batch = CustomBackward(), {"x": X, "lengths": LENGTHS}
    program = record_module(module, batch, granularity=granularity)
    assert program.rung is Rung.FAKE_TENSORS
    _, expected = run_whole(module, batch)
    _, found, _ = run_sliced(program, [find_cut(program, "second")], module, batch)
    assert worst_relative_error(found, expected) == 0


def test_no_cut_comes_between_a_value_and_a_later_write_into_its_memory() -> None:
    """A stage would write to its copy of what it received, and what was sent besides would not change."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.first(x) * 1
            other = self.second(x)
            made[:, 0] = 0
            return self.third(other + made).sum()

    program = record_module(Written(), {"x": torch.ones(2, 4)})
    assert [cut.label for cut in cut_points(program)] == ["third"]
