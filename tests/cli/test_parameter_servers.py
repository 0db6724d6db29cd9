"""Parameter servers on the command line: planned, saved and trained; refused elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import helpers.parameter_servers  # noqa: F401 - it keeps look-ups of names short
from helpers.server_jobs import MODEL
from outsize.cli.app import main
from outsize.plan.files import load_plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ranker.py").write_text(f"KILLS = False\n{MODEL}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exit_code(command: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["outsize", *command.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.mark.distributed
def test_a_saved_plan_trains_with_tables_on_the_servers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`outsize plan --save`, then `outsize train` in bounded mode, with rows, metrics and a checkpoint."""
    plan = "plan ranker.py:build --cluster 2xcpu:64MiB --global-batch 8 --strategy parameter_server"
    assert not exit_code(f"{plan} --mesh dp=2 --save plan.json", monkeypatch)
    saved = load_plan(folder / "plan.json")
    assert (saved.strategy, saved.mesh.dp) == ("parameter_server", 2)
    train = "train ranker.py:build --plan plan.json --servers 2 --updates bounded:1 --row-wise item.*"
    assert not exit_code(f"{train} --name run --steps 4", monkeypatch)
    assert "training loss" in capfd.readouterr().out
    records = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert Path("runs/run/checkpoints/latest").read_text().strip() == "step-00000004"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--strategy mirrored --servers 2", "mirrored, has no parameter servers"),
        ("--strategy mirrored --row-wise item.*", "mirrored, has no parameter servers"),
        ("--strategy parameter_server --mesh tp=2", "compute whole passes"),
        ("--strategy parameter_server --updates bounded", "'bounded' need a number"),
        ("--strategy parameter_server --updates sometimes", "'sometimes' is not a way to update"),
    ],
)
def test_what_does_not_go_together_is_one_message(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and no run directory."""
    command = f"train ranker.py:build --cluster 2xcpu:64MiB --global-batch 8 --steps 1 {options}"
    assert exit_code(command, monkeypatch) == 2
    assert message in capfd.readouterr().err
    assert not Path("runs").exists()
