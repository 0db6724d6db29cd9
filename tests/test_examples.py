"""The examples run as their guides say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import helpers.parameter_servers  # noqa: F401 - it keeps look-ups of names short
from outsize.errors import DoesNotFitError
from outsize.jobs.planning import PlanRequest, find_plan
from outsize.jobs.server_training import ServerSettings
from outsize.jobs.training import RunSettings, train_model
from outsize.plan.plan import Mesh, OptimizerSpec

RANKING = f"{Path(__file__).parents[1] / 'examples' / 'ranking_on_servers.py'}:build"


@pytest.mark.distributed
def test_a_ranker_whose_tables_do_not_fit_a_worker_trains_with_them_on_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 MiB of tables on two servers, workers held to 32 MiB each; whole, they are refused."""
    monkeypatch.chdir(tmp_path)
    whole = PlanRequest(
        model=RANKING,
        cluster="2xcpu:32MiB",
        global_batch=128,
        strategy="parameter_server",
        mesh=Mesh(dp=2),
        optimizer=OptimizerSpec(learning_rate=0.02),
    )
    with pytest.raises(DoesNotFitError):
        find_plan(whole)
    by_rows = replace(whole, row_wise="*")
    servers = ServerSettings(num_servers=2, partitioner="max_size:8MiB")
    settings = RunSettings(
        num_steps=20, num_validation_batches=1, write_checkpoint=False, show_progress=False, servers=servers
    )
    (report,) = train_model(by_rows, settings)
    (_, first), (_, last) = report.validation_losses
    assert last < 0.6 * first
    assert all(0 < peak < 32 << 20 for peak in report.peak_memory_by_rank if peak is not None)
