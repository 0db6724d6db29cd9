"""``outsize plan --cuts``: pipeline stages begin where the user says, or the message names where they may."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outsize.cli.app import main
from outsize.plan.files import load_plan

JOB = "plan gpt2 --cluster 3xA10 --global-batch 8"


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the command as typed; return its exit code, None if it just returns."""
    monkeypatch.setattr(sys, "argv", ["outsize", *command.split()])
    try:
        main()
    except SystemExit as caught:
        return caught.code
    return None


def test_stages_begin_at_the_cuts_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages from two cuts, whatever the balance, in the saved plan too."""
    path = tmp_path / "plan.json"
    assert not run(f"{JOB} --cuts layers.1,layers.9 --save {path}", monkeypatch)
    plan = load_plan(path)
    assert plan.mesh.pp == 3
    assert [stage.begins_at for stage in plan.stages] == ["", "layers.1", "layers.9"]
    assert [len(stage.blocks) for stage in plan.stages] == [2, 8, 4]
    assert plan.stages[2].tied == ("embedding.weight",)


@pytest.mark.parametrize(
    ("wish", "schedules"),
    [
        ("--mesh pp=3", {"interleaved_1f1b", "zb_v", "v_half"}),
        ("--schedule zb_v", {"zb_v"}),
        ("--schedule interleaved_1f1b", {"interleaved_1f1b"}),
    ],
)
def test_ranks_hold_several_stages_where_mesh_or_schedule_say_so(
    wish: str, schedules: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five cuts on three ranks make two stages a rank; the plan has all six."""
    path = tmp_path / "plan.json"
    cuts = [f"layers.{index}" for index in (1, 3, 5, 9, 10)]
    job = JOB.replace("--global-batch 8", "--global-batch 6")
    assert not run(f"{job} --cuts {','.join(cuts)} {wish} --microbatches 6 --save {path}", monkeypatch)
    plan = load_plan(path)
    assert plan.mesh.pp == 3
    assert plan.schedule.name in schedules
    assert plan.schedule.num_virtual_stages == 2
    assert [stage.begins_at for stage in plan.stages] == ["", *cuts]
    assert [len(stage.blocks) for stage in plan.stages] == [2, 2, 2, 4, 1, 3]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("--cuts layers.12", "layers.8, layers.9, layers.10 or layers.11"),
        ("--cuts layers.9,layers.1", "Try: layers.1, layers.9."),
        ("--cuts layers.1,layers.1", "'layers.1' is there twice"),
        ("--cuts layers.1 --mesh pp=3", "1 cuts make 2 stages, the mesh has 3"),
        ("--cuts layers.1 --mesh pp=3", "2 cuts, or 5 for two stages a rank"),
        ("--cuts layers.1,layers.2,layers.3", "needs 4 devices, the cluster has 3"),
        (
            "--cuts layers.1,layers.2,layers.3 --mesh pp=2 --schedule gpipe",
            "gpipe cannot run 2 stages on each of 2 ranks",
        ),
        (
            "--cuts layers.1,layers.2,layers.3,layers.4,layers.5 --mesh pp=2 --microbatches 1",
            "takes micro-batches in rounds of 2",
        ),
    ],
)
def test_cuts_that_cannot_be_are_one_message_with_those_that_can(
    wish: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and legal cuts near the one asked for."""
    assert run(f"{JOB} {wish}", monkeypatch) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error


def test_the_option_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The help gives an example of its form."""
    run("plan --help", monkeypatch)
    help_text = " ".join(capsys.readouterr().out.split())
    assert "begin pipeline stages at these blocks, such as layers.8,layers.16" in help_text
