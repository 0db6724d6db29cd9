"""The public form of recording: from a factory, for batches of many shapes, as stages and as a table."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

import outsize
from coverage_families import FAMILIES
from model.tiny_models import llama
from outsize.errors import ModelError, PlanError, RecordingError
from outsize.model.recording import Recordings

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


def test_another_shape_records_again_up_to_a_limit() -> None:
    """Row B153: shapes are keys; the same shape reuses its recording, too many shapes are refused."""
    module, _ = llama()
    recordings = Recordings(module, max_recordings=2)
    batches = [{"input_ids": torch.ones(2, n, dtype=torch.long)} for n in (4, 7, 4, 5)]
    programs = [recordings.program_for(batch) for batch in batches[:3]]
    assert programs[0] is programs[2]
    assert programs[0] is not programs[1]
    with pytest.raises(RecordingError, match="more than 2 kinds"):
        recordings.program_for(batches[3])


def test_a_broken_guard_records_again() -> None:
    """The same shape with another number read from it is another recording."""

    class Trimmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[:, : int(length)].sum()

    recordings = Recordings(Trimmed())
    x = torch.ones(2, 4)
    first = recordings.program_for({"x": x, "length": torch.tensor(2)})
    assert recordings.program_for({"x": x, "length": torch.tensor(3)}) is not first
    assert recordings.program_for({"x": 2 * x, "length": torch.tensor(2)}) is first
    assert recordings.num_recordings == 2
