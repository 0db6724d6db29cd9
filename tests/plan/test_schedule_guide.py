"""What the guide on schedules shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outsize.plan.schedule_files import load_schedule
from outsize.plan.schedules import SCHEDULE_NAMES

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "schedules.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """Return the guide's only code block in a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    return str(found)


def test_the_example_prints_the_drawing_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Running the Python block gives the picture that follows it."""
    exec(block("python"), {})
    assert f"```\n{capsys.readouterr().out}```" in GUIDE


def test_the_example_file_is_a_schedule_that_runs(tmp_path: Path) -> None:
    """The JSON block loads and passes the validator."""
    (tmp_path / "mine.json").write_text(block("json"))
    assert load_schedule(tmp_path / "mine.json").name == "mine"


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_the_guide_lists_every_schedule(name: str) -> None:
    """No schedule is left out of the table."""
    assert f"| `{name}` |" in GUIDE
