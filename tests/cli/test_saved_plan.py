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
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    command = "plan model.py:build --cluster 2xcpu:1GiB --global-batch 64 --mesh tp=2 --save plan.json"
    monkeypatch.setattr(sys, "argv", ["outsize", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    plan = load_plan(tmp_path / "plan.json")
    assert not ended.value.code
    assert plan.sharding is not None
    assert plan.sharding.degree == 2
    check_runnable(plan)
