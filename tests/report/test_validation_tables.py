"""Tables of predicted against published runs on a narrow terminal."""

from io import StringIO

from rich.console import Console

from outsize.report.validation_tables import source_table

_TIME = {"num_rows": 54, "mean_abs_error": 0.0241, "median_abs_error": 0.02, "mean_error": -0.004}
_MEMORY = {"num_rows": 6, "mean_abs_error": 0.125, "median_abs_error": 0.1, "mean_error": 0.1}
_NOTHING = {"num_rows": 0, "mean_abs_error": None, "median_abs_error": None, "mean_error": None}


def test_errors_of_every_source_are_whole_on_eighty_columns() -> None:
    """Mean and median of time and memory stand in full; what was not measured is a dash."""
    form = {
        "time": {
            **_TIME,
            "by_source": {"A publisher with quite a long name, and its table 3": _TIME, "B": _NOTHING},
        },
        "memory": {**_MEMORY, "by_source": {"B": _MEMORY}},
    }
    console = Console(width=80, file=StringIO(), record=True)
    console.print(source_table(form))
    lines = console.export_text().splitlines()
    assert all(len(line) <= 80 for line in lines)
    of_b = next(line for line in lines if line.strip().startswith("B "))
    assert of_b.split() == ["B", "–", "–", "–", "6", "12.5%", "/", "10.0%"]
    of_all = next(line for line in lines if line.strip().startswith("all"))
    assert of_all.split() == ["all", "54", "2.4%", "/", "2.0%", "-0.4%", "6", "12.5%", "/", "10.0%"]
