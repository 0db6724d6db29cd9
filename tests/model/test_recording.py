"""The public form of recording: from a factory, as stages and as a table."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

import outsize
from coverage_families import FAMILIES
from outsize.errors import ModelError, PlanError, RecordingError

FAMILY = FAMILIES["llama_tied"]


def test_a_factory_is_recorded_without_memory_and_sliced() -> None:
    """Every parameter is in exactly the stages that use it, under its full name."""
    program = outsize.record(FAMILY.build, FAMILY.batch())
    labels = [cut.label for cut in program.cut_points()]
    assert labels[:4] == [f"model.layers.{index}" for index in range(4)]
    first, second = program.slice(["model.layers.2"])
    names = [dict(stage.named_parameters(remove_duplicate=False)) for stage in (first, second)]
    assert all(parameter.is_meta for stage in names for parameter in stage.values())
    whole = set(dict(FAMILY.build().named_parameters()))
    assert set(names[0]) | set(names[1]) >= whole
    assert "model.embed_tokens.weight" in names[0]
    assert not set(names[0]) & {name for name in whole if "layers.2" in name or "layers.3" in name}


def test_stages_of_a_module_train_it() -> None:
    """Stage modules share the recorded module's parameters: B16's tied weight gets both gradients."""
    module = FAMILY.build()
    program = outsize.record(module, FAMILY.batch())
    first, second = program.slice([program.cut_points()[1]])
    entries = FAMILY.batch()
    sent = first(**{name: entries[name] for name in first.part.batch_entries})
    second(*sent, **{name: entries[name] for name in second.part.batch_entries}).loss.backward()
    found = module.model.embed_tokens.weight.grad
    whole = FAMILY.build()
    whole(**entries).loss.backward()
    torch.testing.assert_close(found, whole.model.embed_tokens.weight.grad, rtol=1e-12, atol=1e-15)
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_the_table_shows_repeated_blocks_once() -> None:
    """Four equal layers are one row."""
    program = outsize.record(FAMILY.build, FAMILY.batch())
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(program.table())
    text = console.export_text()
    (row,) = [line for line in text.splitlines() if "LlamaDecoderLayer" in line]
    assert "model.layers.0 … model.layers.3" in row
    assert "recorded on fake tensors" in text


def test_a_wrong_label_or_order_is_refused() -> None:
    """Cuts have to exist and to increase."""
    program = outsize.record(FAMILY.build, FAMILY.batch())
    with pytest.raises(PlanError, match=r"no block named model\.layers\.9"):
        program.slice(["model.layers.9"])
    with pytest.raises(PlanError, match="do not divide"):
        program.slice(["model.layers.2", "model.layers.1"])


def test_a_factory_that_builds_another_model_each_time_is_refused() -> None:
    """A counter in the factory is noticed, and the first tensor that differs is named."""
    widths = iter(range(3, 9))

    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(2, next(widths)))

    with pytest.raises(ModelError, match=r"0\.bias is .*\(3,\).*then .*\(4,\)"):
        outsize.record(factory, (torch.ones(2, 2),))


def test_a_forward_that_takes_another_way_each_time_is_refused() -> None:
    """Global state in the forward makes two recordings differ."""
    calls = iter(range(9))

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x.sin().mean() if next(calls) % 2 else x.cos().mean()

    with pytest.raises(RecordingError, match="two recordings differ"):
        outsize.record(Moody, (torch.ones(2, 2),))
