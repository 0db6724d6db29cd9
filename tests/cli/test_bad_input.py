"""A user's mistake is one message and exit code 2, before any process starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outsize.cli.app import main
from outsize.runtime import launch

MODEL = """
import numpy
import torch
from torch import nn


class Plain(nn.Module):
    def forward(self, x, target):
        return {"loss": nn.functional.mse_loss(x, target)}


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x, target):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": nn.functional.mse_loss(x, target)}


def build():
    return Chain()


def broken():
    raise OSError("the weights are on another disk")


built = Chain()


def no_parameters():
    return Plain()


def ends_building():
    raise SystemExit(3)


def ends(num_samples):
    raise SystemExit(3)


def nothing(num_samples):
    return None


def arrays(num_samples):
    return {"x": numpy.zeros((num_samples, 5)), "target": numpy.zeros((num_samples, 5))}


def no_samples(num_samples):
    return {"x": torch.zeros(0, 5), "target": torch.zeros(0, 5)}


def batch(num_samples, *, step=0, split="train"):
    x = torch.randn(num_samples, 5, generator=torch.Generator().manual_seed(step))
    return {"x": x, "target": x}
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with model.py; starting a process is an error of the test."""

    def no_processes(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start_processes", no_processes)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "ends.py").write_text("raise SystemExit")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    (tmp_path / "folder").mkdir()


def run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run ``outsize`` with arguments; return its error output after checking that it ends with code 2."""
    monkeypatch.setattr(sys, "argv", ["outsize", *command.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    lines = capsys.readouterr().err.splitlines(keepends=True)
    error = "".join(line for line in lines if not line.startswith("launch environment: "))
    assert caught.value.code == 2, error
    assert "Traceback" not in error
    assert error.startswith("outsize: ")
    return error


TRAIN = "train model.py:build --cluster 4xcpu:256MiB --global-batch 8"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train missing.py:build --cluster 2xcpu:1GiB", "there is no file missing.py"),
        ("train model.py:biuld --cluster 2xcpu:1GiB", "has no function biuld"),
        ("train model.py:broken --cluster 2xcpu:1GiB", "the weights are on another disk"),
        (f"{TRAIN} --mesh dp=3", "8"),
        (f"{TRAIN} --mesh pp=2 --microbatches 3", "3"),
        (f"{TRAIN} --mesh pp=4", "stages"),
        (f"{TRAIN} --mesh tp=4", "4"),
        ("train model.py:build --cluster 0xcpu:1GiB", "0"),
        ("train model.py:build --cluster 4xcpu:1KiB", "fit"),
        ("train model.py:build", "no plan"),
        ("train model.py:build --plan nowhere.json", "nowhere.json"),
        ("plan no-such-preset --cluster 2xcpu:1GiB --global-batch 8", "no-such-preset"),
        ("plan gpt2 --cluster 8xA1000 --global-batch 8", "A1000"),
        (f"{TRAIN} --mesh pp=2,pp=4", "pp is given twice"),
        (f"{TRAIN} --mesh pp=²", "no degree"),
        (f"{TRAIN} --resume", "none is named"),
        (f"{TRAIN} --num-machines 2", "--machine-rank"),
        (f"{TRAIN} --data model.py:ends", "SystemExit: 3"),
        (f"{TRAIN} --data model.py:nothing", "is no batch"),
        (f"{TRAIN} --data model.py:arrays", "is a ndarray"),
        (f"{TRAIN} --data model.py:no_samples", "has no samples"),
        (f"{TRAIN} --data model.py:built", "is no function but Chain"),
        ("train model.py --cluster 4xcpu:1GiB", "Try: model.py:function"),
        ("train gpt2 --cluster 4xcpu:1GiB", "presets have sizes alone"),
        ("plan model.py --cluster 4xcpu:1GiB --global-batch 8", "Try: model.py:function"),
        ("plan model.py:built --cluster 4xcpu:1GiB --global-batch 8", "is no function but Chain"),
        ("plan model.py:ends_building --cluster 4xcpu:1GiB --global-batch 8", "SystemExit"),
        ("plan model.py:no_parameters --cluster 4xcpu:1GiB --global-batch 8", "no parameters"),
        ("plan ends.py:build --cluster 4xcpu:1GiB --global-batch 8", "__main__"),
        ("plan binary.py:build --cluster 4xcpu:1GiB --global-batch 8", "it is no Python"),
        ("plan gpt2 --cluster 999999999999xcpu:1GiB --global-batch 8", "more than 1,000,000"),
        ("plan gpt2 --cluster 8gigs --global-batch 8", "neither a kind of device nor an amount"),
        ("plan gpt2 --cluster 8xH100 --global-batch 8 --save folder", "folder cannot be written"),
        ("plan gpt2 --cluster 8xH100 --global-batch 8 --save no/plan.json", "there is no folder no"),
        ("plan gpt2 --cluster 8xH100 --global-batch 8 --html no/page.html", "there is no folder no"),
        ("plan gpt2 --cluster 8xH100 --global-batch 8 --device-mtbf-hours nan", "nan h"),
        ("explain folder", "Try: a file that `outsize plan --save` wrote"),
        ("explain binary.py", "is not JSON"),
        ("compare binary.py folder", "is not JSON"),
        ("validate folder", "Why: Is a directory"),
        ("inspect model.py:no_samples", "needs arguments"),
    ],
)
def test_a_mistake_is_one_message(
    command: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names what is wrong."""
    assert expected in run(command, monkeypatch, capsys)


@pytest.mark.parametrize(
    "command",
    [
        f"{TRAIN} --steps 0",
        f"{TRAIN} --seed -1",
        f"{TRAIN} --evaluate-every -1",
        f"{TRAIN} --validation-batches -1",
        f"{TRAIN} --num-machines 0",
        f"{TRAIN} --sequence 0",
        "plan gpt2 --cluster 8xH100 --global-batch 8 --sequence 0",
        "plan gpt2 --cluster 8xH100 --global-batch 8 --sequence 99999999999999",
        "inspect model.py:build --sequence 0",
        "demo --steps 0",
    ],
)
def test_a_number_out_of_range_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is named, and so is what it may be."""
    monkeypatch.setattr(sys, "argv", ["outsize", *command.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert f"Invalid value for '{command.split()[-2]}'" in error


def test_a_run_directory_that_exists_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of an earlier run is touched."""
    earlier = Path("runs/first/plan.json")
    earlier.parent.mkdir(parents=True)
    earlier.write_text("kept")
    assert "exists already" in run(f"{TRAIN} --name first", monkeypatch, capsys)
    assert earlier.read_text() == "kept"
