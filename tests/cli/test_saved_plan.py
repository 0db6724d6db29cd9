"""A plan that was saved can be trained under."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outsize.cli.app import main
from outsize.plan.files import load_plan
from outsize.runtime.runnable import check_runnable

MODEL = """
import torch
from torch import nn


def build():
    return Loss(nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)))


class Loss(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x).square().mean()


def batch(num_samples):
    return {"x": torch.ones(num_samples, 512)}
"""


def test_a_saved_tensor_parallel_plan_holds_its_operator_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`outsize plan --save` writes all that `outsize train --plan` needs."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    command = "plan model.py:build --cluster 2xcpu:1GiB --global-batch 64 --mesh tp=2 --save plan.json"
    assert not exit_code(command, monkeypatch)
    plan = load_plan(tmp_path / "plan.json")
    assert plan.sharding is not None
    assert plan.sharding.degree == 2
    check_runnable(plan)


def test_a_saved_plan_keeps_the_placements_the_user_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows where the search takes columns; where nothing is split, the file is refused."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "operators.toml").write_text('[placements]\n"*.0.weight" = "S1"\n')
    monkeypatch.chdir(tmp_path)
    command = "plan model.py:build --cluster 2xcpu:1GiB --global-batch 64 --placements operators.toml"
    assert not exit_code(f"{command} --mesh tp=2 --save plan.json", monkeypatch)
    sharding = load_plan(tmp_path / "plan.json").sharding
    assert sharding is not None
    assert sharding.parameters["layers.0.weight"] == "S1"
    assert exit_code(f"{command} --mesh dp=2", monkeypatch) == 2
    assert "has nothing to decide" in capsys.readouterr().err


def test_a_model_too_small_to_split_is_told_with_the_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What every strategy needs is said before that there is nothing to save."""
    (tmp_path / "model.py").write_text(MODEL.replace("2048", "8").replace("512", "4"))
    monkeypatch.chdir(tmp_path)
    command = "plan model.py:build --cluster 2xcpu:1GiB --global-batch 4 --mesh tp=2 --save plan.json"
    assert exit_code(command, monkeypatch) == 2
    said = capsys.readouterr()
    assert "mirrored" in said.out
    assert "worth splitting" in said.err
    assert not (tmp_path / "plan.json").exists()


def exit_code(command: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["outsize", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
