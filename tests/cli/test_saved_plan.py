"""A plan that was saved can be trained under."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.models import train_reference
from outsize.cli.app import main
from outsize.model.argument import load_model
from outsize.plan.files import load_plan
from outsize.plan.plan import OptimizerSpec
from outsize.plan.schedule_files import load_schedule
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


DEEP_MODEL = """
import torch
from torch import nn


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": x.square().mean()}


def build():
    return Deep()


def batch(num_samples, *, step=0):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(num_samples, 16, dtype=torch.float64, generator=generator)}
"""


@pytest.mark.distributed
def test_a_saved_plan_with_a_synthesised_schedule_trains_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan --schedule synthesised --save` and `train --plan`: losses of three steps as on one process."""
    (tmp_path / "deep.py").write_text(DEEP_MODEL)
    monkeypatch.chdir(tmp_path)
    command = "plan deep.py:build --cluster 2xcpu:1GiB --global-batch 8 --mesh pp=2 --microbatches 4"
    assert not exit_code(f"{command} --schedule synthesised --save plan.json", monkeypatch)
    assert load_plan(tmp_path / "plan.json").schedule.name == "plan.schedule.json"
    assert load_schedule(tmp_path / "plan.schedule.json").name == "synthesised"
    assert not exit_code("train deep.py:build --plan plan.json --steps 3 --name run", monkeypatch)
    records = map(json.loads, (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines())
    found = [record["loss"] for record in records if "loss" in record]
    source = load_model("deep.py:build")
    batches = [source.make_batch(8, step=step) for step in range(3)]
    losses, *_ = train_reference(source.factory, batches, OptimizerSpec(learning_rate=1e-3))
    assert found == pytest.approx(losses, rel=1e-12)


def exit_code(command: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["outsize", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
