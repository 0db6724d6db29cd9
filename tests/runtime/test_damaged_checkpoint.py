"""A checkpoint of which a file is cut short, garbled or missing is refused in words, and nothing changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from outsize.errors import LaunchError, PlanError
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.parallel_model import ParallelModel
from outsize.runtime.parallelize import parallelize
from outsize.runtime.parameter_server.checkpoint import read_info

X = (torch.ones(4, 3),)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = self.linear(x).square()
        return squares.mean()


def make_model() -> ParallelModel:
    plan = Plan("mirrored", Mesh(), (StageSpec(0, ""),), ScheduleSpec(), 4)
    return parallelize(Line, plan, sample_batch=X)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    model = make_model()
    for _ in range(2):
        model.train_step(X)
        model.save_checkpoint(folder)
    return folder


@pytest.fixture
def folder(two_checkpoints: Path, tmp_path: Path) -> Path:
    """A folder with step-00000001 and step-00000002, to damage."""
    return shutil.copytree(two_checkpoints, tmp_path / "checkpoints")


def tensors_of(checkpoint: Path) -> Path:
    (path,) = checkpoint.glob("*.safetensors")
    return path


def cut_short(checkpoint: Path) -> str:
    path = tensors_of(checkpoint)
    path.write_bytes(path.read_bytes()[:-5])
    return path.name


def cut_short_without_a_list(checkpoint: Path) -> str:
    """As servers write it: their description lists no files."""
    (checkpoint / "checkpoint.json").write_text(json.dumps({"format_version": 1, "step": 2}))
    return cut_short(checkpoint)


def garble_header(checkpoint: Path) -> str:
    path = tensors_of(checkpoint)
    content = bytearray(path.read_bytes())
    content[8:40] = b"?" * 32
    path.write_bytes(content)
    return path.name


def remove_tensors(checkpoint: Path) -> str:
    path = tensors_of(checkpoint)
    path.unlink()
    return f"{path.name} is missing"


def lose_rows(checkpoint: Path) -> str:
    """One of two files of a tensor's rows is gone, and no list of files says so."""
    from safetensors.torch import load_file, save_file

    path = tensors_of(checkpoint)
    values, rows = load_file(path), {"linear.weight": torch.ones(2, 3)}
    del values["linear.weight"]
    for name, kept in (("shard-1", values), ("shard-2", rows)):
        offsets = {
            key: {"saved_offsets": [int(kept is rows)] + [0] * (v.dim() - 1)} for key, v in kept.items()
        }
        save_file(kept, checkpoint / f"{name}.safetensors", {"DCP_SHARDING_INFO": json.dumps(offsets)})
    path.unlink()
    (checkpoint / "checkpoint.json").write_text(json.dumps({"format_version": 1, "step": 2}))
    return "6 of the 9 elements of linear.weight"


def describe_as(text: str) -> Callable[[Path], str]:
    def damage(checkpoint: Path) -> str:
        (checkpoint / "checkpoint.json").write_text(text)
        return "checkpoint.json"

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        cut_short_without_a_list,
        garble_header,
        remove_tensors,
        lose_rows,
        describe_as(""),
        describe_as('{"format_version": 1, "st'),
        describe_as("[1]"),
        describe_as('{"format_version": 1}'),
        describe_as('{"format_version": 1, "step": "two"}'),
    ],
)
def test_damage_is_named_and_an_earlier_checkpoint_offered(
    folder: Path, damage: Callable[[Path], str]
) -> None:
    """The message has the file and the checkpoint before; the model goes on as it was, and loads that one."""
    model = make_model()
    model.train_step(X)
    before = [tensor.clone() for tensor in model.parameters.values()]
    problem = damage(folder / "step-00000002")
    with pytest.raises(LaunchError, match="is damaged") as caught:
        model.load_checkpoint(folder)
    assert problem in caught.value.why
    assert "step-00000001" in caught.value.attempt
    assert all(map(torch.equal, model.parameters.values(), before))
    assert model.num_steps == 1
    assert all(state["step"] == 1 for state in model.optimizer.state.values())
    model.load_checkpoint(folder / "step-00000001")


def test_a_pointer_to_nothing_offers_what_is_complete(folder: Path) -> None:
    """Garbled or missing, `latest` is named with a checkpoint that can be written into it."""
    (folder / "latest").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="no checkpoint") as caught:
        find_checkpoint(folder)
    assert "write step-00000002 into" in caught.value.attempt
    (folder / "latest").unlink()
    with pytest.raises(LaunchError, match="latest, which names the newest complete one, is not there"):
        find_checkpoint(folder)


def test_a_newer_format_is_refused(folder: Path) -> None:
    """A file of a later version is not damaged, and not guessed at."""
    describe_as('{"format_version": 9}')(folder / "step-00000002")
    with pytest.raises(PlanError, match="format version 9"):
        make_model().load_checkpoint(folder)


def test_pushes_that_servers_applied_are_numbers(folder: Path) -> None:
    """What parameter servers read of a description is checked as well."""
    assert read_info(folder).step == 2
    describe_as('{"format_version": 1, "step": 2, "applied": "all"}')(folder / "step-00000002")
    with pytest.raises(LaunchError, match="gives 'all' as the pushes applied"):
        read_info(folder)


def test_a_checkpoint_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """A file stands where the folder should be: one error with the reason, not torch's own."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(LaunchError, match="could not be written"):
        make_model().save_checkpoint(tmp_path / "taken")
