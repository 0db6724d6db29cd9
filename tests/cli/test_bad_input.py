"""A user's mistake is one message and exit code 2, before any process starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outsize.cli.app import main
from outsize.runtime import launch

MODEL = """
import torch
from torch import nn


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
    ],
    ids=[
        "unknown model path",
        "unknown function",
        "factory that raises",
        "batch not divisible by replicas",
        "batch not divisible by micro-batches",
        "more stages than blocks",
        "degree that no operator can take",
        "zero devices",
        "limit too small for any strategy",
        "neither plan nor cluster",
        "plan that is not there",
        "unknown preset",
        "unknown device",
    ],
)
def test_a_mistake_is_one_message(
    command: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names what is wrong."""
    assert expected in run(command, monkeypatch, capsys)


def test_a_run_directory_that_exists_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of an earlier run is touched."""
    earlier = Path("runs/first/plan.json")
    earlier.parent.mkdir(parents=True)
    earlier.write_text("kept")
    assert "exists already" in run(f"{TRAIN} --name first", monkeypatch, capsys)
    assert earlier.read_text() == "kept"
