"""Where a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from outsize.errors import LaunchError
from outsize.jobs.run_directory import choose_run_directory


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_that_exists_is_never_overwritten() -> None:
    """A second run of the same name is refused, and says how to go on."""
    (Path("runs") / "first").mkdir(parents=True)
    (Path("runs") / "first" / "plan.json").write_text("{}")
    with pytest.raises(LaunchError, match="exists already") as caught:
        choose_run_directory("first")
    assert "--resume" in str(caught.value)
    assert choose_run_directory("first", resume=True) == Path("runs/first")


def test_nothing_to_resume_is_an_error() -> None:
    """Asked to resume, a run that is not there does not start from scratch (known-failures B117)."""
    with pytest.raises(LaunchError, match="no run in"):
        choose_run_directory("missing", resume=True)


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden"])
def test_a_name_stays_below_runs(name: str) -> None:
    """A name with a path in it is refused."""
    with pytest.raises(LaunchError, match="cannot be the name"):
        choose_run_directory(name)


def test_unnamed_runs_are_numbered() -> None:
    """Without a name the next free number is taken."""
    assert choose_run_directory(None) == Path("runs/0001")
    (Path("runs") / "0041").mkdir(parents=True)
    assert choose_run_directory(None) == Path("runs/0042")
