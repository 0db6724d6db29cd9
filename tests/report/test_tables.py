"""What the tables say."""

import io

import pytest
from rich.console import Console

from helpers.profiles import chain_profile
from outsize.cluster.argument import parse_cluster
from outsize.planner.search import plan_job
from outsize.report.tables import category_table, memory_table, plan_summary, verdict_reasons, verdict_table


@pytest.fixture(scope="module")
def result():
    cluster = parse_cluster("4xcpu:100MiB", num_cores=2)
    return plan_job(chain_profile(), cluster, global_batch=16, strategy="pipeline_parallel")


def _text(table, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_the_verdict_table_has_every_strategy_with_its_reason(result) -> None:
    """Names, codes, bytes and the mark of what was chosen."""
    text = _text(verdict_table(result.verdicts, chosen=result.best.strategy))
    for verdict in result.verdicts:
        assert verdict.name in text
        assert verdict.reason_code in text
    assert "pipeline_parallel ◀" in text


def test_measured_memory_stands_beside_the_prediction(result) -> None:
    """A rank measured 10% above its tensors shows +10.0%, one without a measurement a dash."""
    by_category = result.best.prediction.memory_by_rank[0]
    predicted = sum(by_category.values()) - by_category["reserve"]
    text = _text(memory_table(result.best, [round(predicted * 1.1), None]))
    assert "+10.0%" in text
    assert "–" in text


def test_the_summary_says_what_a_step_consists_of(result) -> None:
    """Strategy, micro-batches and the parts of the step time."""
    text = _text(plan_summary(result.best))
    assert "pipeline_parallel" in text
    assert "compute" in text
    assert _text(category_table(result.verdicts)).count("MiB") > 10


def test_nothing_is_cut_off_at_eighty_columns(result) -> None:
    """Verdicts, reasons and bytes all show whole on a usual terminal."""
    texts = [
        _text(verdict_table(result.verdicts, chosen=result.best.strategy), 80),
        _text(verdict_reasons(result.verdicts), 80),
        _text(category_table(result.verdicts), 80),
    ]
    assert all("…" not in text for text in texts)
    for verdict in result.verdicts:
        assert f"{verdict.name}:" in texts[1]
    bottom = texts[2].rstrip().splitlines()[-1]
    assert bottom.count("MiB") == len(result.verdicts)
