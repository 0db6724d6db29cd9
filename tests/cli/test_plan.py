"""The plan, explain, compare and validate commands as a user types them."""

import json
import subprocess
import sys

import pytest


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outsize", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
    )


_JOB = ("gpt2-large", "--cluster", "2x4xA10", "--global-batch", "32")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A plan, another plan and a page, made by the command."""
    folder = tmp_path_factory.mktemp("plans")
    first = _run("plan", *_JOB, "--json", "--save", str(folder / "a.json"), "--html", str(folder / "a.html"))
    second = _run("plan", *_JOB, "--mesh", "pp=2,dp=4", "--save", str(folder / "b.json"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    return folder, json.loads(first.stdout)


def test_json_has_the_documented_fields(files) -> None:
    """One object with strategies, best, optimality_gap and search_time_s."""
    _, form = files
    assert set(form) == {"strategies", "best", "optimality_gap", "search_time_s"}
    assert [strategy["name"] for strategy in form["strategies"]] == [
        "mirrored", "multi_worker_mirrored", "parameter_server", "fully_sharded", "pipeline_parallel",
        "tensor_parallel", "combined",
    ]  # fmt: skip
    for strategy in form["strategies"]:
        assert strategy["needed_bytes"] == sum(strategy["by_category"].values())
        assert (strategy["step_time_s"] is not None) == strategy["fits"]
    best = form["best"]
    assert best["peak_memory_bytes"] <= form["strategies"][0]["available_bytes"]
    assert best["step_time_s"] <= min(s["step_time_s"] for s in form["strategies"] if s["fits"]) * (1 + 1e-9)
    assert 0 <= form["optimality_gap"] < 1


def test_every_report_says_what_the_figures_rest_on(files) -> None:
    """The rung of the fallback ladder and its error bands: JSON, page, explanation and terminal."""
    folder, form = files
    assert form["best"]["rung"] == "formulas"
    assert set(form["best"]["error_bands"]) == {"memory", "step_time"}
    assert "formulas of a preset" in (folder / "a.html").read_text()
    assert "formulas of a preset" in _run("explain", str(folder / "a.json")).stdout
    assert "formulas of a preset" in _run("plan", *_JOB).stdout


def test_the_page_stands_alone_and_names_every_strategy(files) -> None:
    """No address is loaded, and each option is there with its reason."""
    folder, form = files
    page = (folder / "a.html").read_text()
    assert "http" not in page
    assert "<script" not in page
    for strategy in form["strategies"]:
        assert strategy["name"].replace("_", " ") in page
        assert strategy["reason_code"] in page


def test_explain_and_compare_read_saved_plans(files) -> None:
    """They say why, why not, and what differs."""
    folder, _ = files
    whole = _run("explain", str(folder / "a.json"))
    other = _run("explain", str(folder / "a.json"), "--why-not", "pp=2,tp=4")
    strategy = _run("explain", str(folder / "a.json"), "--why-not", "parameter_server")
    differences = _run("compare", str(folder / "a.json"), str(folder / "b.json"))
    assert "neediest device" in whole.stdout
    assert "times the plan's" in other.stdout
    assert "It is right when embeddings dwarf" in strategy.stdout
    assert "pp degree" in differences.stdout
    assert _run("compare", str(folder / "a.json"), str(folder / "a.json")).stdout.strip().endswith("the same")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("plan", "llama9", "--cluster", "8xH100", "--global-batch", "8"), "neither a preset"),
        (("plan", "gpt2", "--cluster", "0xH100", "--global-batch", "8"), "zero devices"),
        (("plan", "gpt2", "--cluster", "8xH100", "--global-batch", "0"), "no sample"),
        (("plan", "gpt2", "--cluster", "8xH100", "--global-batch", "8", "--mesh", "qq=2"), "mesh axis"),
        (("plan", "llama3-405b", "--cluster", "2x24GiB", "--global-batch", "8"), "No strategy fits"),
        (("explain", "missing.json"), "cannot be read"),
        (("validate", "missing.csv"), "cannot be read"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_two(arguments, part) -> None:
    """No traceback."""
    result = _run(*arguments)
    assert result.returncode == 2
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_a_sought_schedule_is_saved_beside_the_plan(tmp_path) -> None:
    """The plan names the file, and the form tells time, best fixed schedule and bound."""
    from outsize.plan.files import load_plan
    from outsize.plan.schedule_files import load_schedule

    path = tmp_path / "plan.json"
    job = ("gpt2-large", "--cluster", "4xA10", "--global-batch", "8", "--mesh", "pp=4", "--microbatches", "8")
    result = _run("plan", *job, "--schedule", "synthesised", "--save", str(path), "--json")
    assert result.returncode == 0, result.stderr
    search = json.loads(result.stdout)["schedule_search"]
    assert search["lower_bound_s"] <= search["pipeline_s"] * (1 + 1e-9)
    assert search["pipeline_s"] <= search["best_fixed_s"] * (1 + 1e-9)
    plan = load_plan(path)
    if plan.schedule.name.endswith(".json"):
        assert load_schedule(tmp_path / "plan.schedule.json").num_microbatches == 8


def test_goodput_of_a_hundred_thousand_devices_is_in_the_output() -> None:
    """Failures every 50,000 h a device come every half hour over 98,304: a checkpoint every few minutes."""
    result = _run(
        "plan", "llama3-405b", "--cluster", "98304xH100", "--global-batch", "12288", "--sequence", "8192",
        "--mesh", "pp=16,dp=768,tp=8", "--device-mtbf-hours", "50000", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    goodput = json.loads(result.stdout)["goodput"]
    assert goodput["mean_time_between_failures_s"] == pytest.approx(50_000 * 3600 / 98_304)
    assert 0 < goodput["checkpoint_interval_s"] < goodput["mean_time_between_failures_s"]
    assert 0.5 < goodput["share"] < 1
