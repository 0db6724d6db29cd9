"""Published runs: how rows are read, and that predictions of well-documented ones hold."""

import csv
from pathlib import Path

import pytest

from outsize.errors import OutsizeError
from outsize.planner.choice import choice_ratios
from outsize.planner.published_runs import Unmodelled, load_runs, read_run
from outsize.planner.validation import error_summary, predict_run

_SHARED = Path(__file__).parents[3] / "shared" / "validation" / "published-runs.csv"

# Narayanan et al. 2021, table 2 (PTD-P rows): 530B on 560 to 2240 A100, TFLOP/s with recompute counted.
_ROW = {
    "source": "Narayanan et al. SC21 (arXiv 2104.04473)", "table": "Table 2", "model": "GPT-530B",
    "params_b": "529.6", "layers": "105", "hidden": "20480", "heads": "128", "kv_heads": "128",
    "ffn_hidden": "81920", "vocab": "51200", "seq_len": "2048", "experts": "", "gpu": "A100-SXM",
    "gpu_mem_gb": "80", "peak_tflops": "312", "gpus": "560", "tp": "8", "pp": "35", "cp": "1", "ep": "",
    "dp": "2", "vpp": "1", "schedule": "", "zero_stage": "0", "sequence_parallel": "no", "recompute": "full",
    "micro_batch": "1", "global_batch": "2240", "precision": "fp16", "tflops_per_gpu": "171", "mfu": "",
    "tokens_per_s_per_gpu": "", "iter_time_s": "", "mem_gb_per_gpu": "", "notes": "",
}  # fmt: skip


@pytest.mark.parametrize(("gpus", "tflops"), [("560", "171"), ("1120", "167"), ("2240", "159")])
def test_530b_on_a_growing_cluster_is_predicted_within_five_per_cent(gpus, tflops) -> None:
    """Published TFLOP/s of table 2, turned into seconds by the authors' own formula."""
    prediction = predict_run(read_run({**_ROW, "gpus": gpus, "tflops_per_gpu": tflops}, 2))
    assert abs(prediction.time_error) < 0.05


def test_tflops_are_read_by_the_authors_formula() -> None:
    """96 B s L h² (1 + s/6h + V/16Lh) ÷ (560 devices x 171 TFLOP/s) is 240 s."""
    run = read_run(_ROW, 2)
    layers, hidden, sequence, vocab = 105, 20480, 2048, 51200
    flops = 96 * 2240 * sequence * layers * hidden**2
    flops *= 1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)
    assert run.step_time_s == pytest.approx(flops / (560 * 171e12))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"micro_batch": ""}, "not published: micro_batch"),
        ({"gpu": "Abacus"}, "unknown device"),
        ({"gpus": "561"}, "do not divide"),
        ({"schedule": "mystery"}, "mystery"),
        ({"schedule": "zb-1p", "vpp": "3"}, "3 virtual stages"),
        ({"recompute": ""}, "recomputed is not published"),
        ({"tflops_per_gpu": ""}, "neither time nor memory"),
    ],
)
def test_a_row_that_says_too_little_is_refused_with_the_reason(change, part) -> None:
    """No number is made up for a blank column."""
    with pytest.raises(Unmodelled, match=part):
        read_run({**_ROW, **change}, 2)


def test_a_file_without_the_columns_is_one_message(tmp_path) -> None:
    """So is a file that is not there."""
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(OutsizeError, match="no column"):
        load_runs(path)
    with pytest.raises(OutsizeError, match="cannot be read"):
        load_runs(tmp_path / "missing.csv")


@pytest.mark.parametrize(
    ("change", "schedule", "virtual"),
    [
        ({"vpp": "3"}, "interleaved_1f1b", 3),
        ({"schedule": "interleaved-1f1b", "vpp": "1"}, "1f1b", 1),
        ({"schedule": "v-half", "vpp": ""}, "v_half", 2),
    ],
)
def test_a_schedule_has_the_virtual_stages_it_can_have(change, schedule, virtual) -> None:
    """Columns that contradict each other, or leave out what the schedule implies."""
    layout = read_run({**_ROW, **change}, 2).layout
    assert (layout.schedule, layout.num_virtual_stages) == (schedule, virtual)


def test_a_figure_that_is_no_number_refuses_its_row_only(tmp_path) -> None:
    """Text or zero where a size should be: the other rows are predicted all the same."""
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _ROW)
        writer.writeheader()
        writer.writerows([{**_ROW, "hidden": "wide"}, {**_ROW, "micro_batch": "0"}, _ROW])
    runs, refused = load_runs(path)
    assert [run.row for run in runs] == [4]
    assert [row for row, _ in refused] == [2, 3]


def test_the_planners_choice_is_at_least_as_fast_as_what_was_published(tmp_path) -> None:
    """The published layout of GPT-7.5B on 128 devices lies in the space that is searched."""
    small = {
        **_ROW, "model": "GPT-7.5B", "params_b": "7.5", "layers": "36", "hidden": "4096", "heads": "32",
        "kv_heads": "32", "ffn_hidden": "16384", "gpus": "128", "tp": "4", "pp": "1", "dp": "32",
        "micro_batch": "16", "global_batch": "512", "tflops_per_gpu": "142",
    }  # fmt: skip
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, small)
        writer.writeheader()
        writer.writerow(small)
    runs, refused = load_runs(path)
    ratios = list(choice_ratios([predict_run(runs[0])]))
    assert not refused
    assert len(ratios) == 1
    assert ratios[0] >= 1


@pytest.mark.skipif(not _SHARED.exists(), reason="the published runs are not beside this checkout")
def test_errors_on_the_published_runs_do_not_grow() -> None:
    """Time within 8% (mean) and 5% (median), memory within 3.5%: what was reached, as a ratchet."""
    runs, _ = load_runs(_SHARED)
    predictions = []
    for run in runs:
        try:
            predictions.append(predict_run(run))
        except Unmodelled:
            continue
    time = error_summary(predictions, lambda prediction: prediction.time_error)
    memory = error_summary(predictions, lambda prediction: prediction.memory_error)
    assert time["num_rows"] > 350
    assert time["mean_abs_error"] < 0.08
    assert time["median_abs_error"] < 0.05
    assert memory["mean_abs_error"] < 0.035
