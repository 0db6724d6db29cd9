"""The evaluator reads checkpoints only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from helpers.parameter_servers import make_settings, servers_in_threads
from outsize.errors import TrainingError
from outsize.runtime.parameter_server.client import ServerClient
from outsize.runtime.parameter_server.evaluator import evaluate_checkpoints
from outsize.runtime.parameter_server.layout import Variable

pytestmark = pytest.mark.distributed


def test_it_skips_to_the_newest_survives_deletion_and_stops_after_the_last(tmp_path: Path) -> None:
    """Of versions 0 to 3: sees 1 (0 is old), misses the deleted 2, ends with 3."""
    with servers_in_threads(make_settings([Variable("a", (1,), torch.float64)])) as coordinator:
        client = ServerClient(coordinator.membership, "worker/0")
        folders = [coordinator.save(tmp_path)]

        def advance() -> None:
            client.push({"a": -torch.ones(1)})
            folders.append(coordinator.save(tmp_path))

        advance()
        results = evaluate_checkpoints(
            tmp_path, lambda parameters: parameters["a"].item(), last_step=3, poll_s=0.01, timeout_s=0.1
        )
        assert next(results) == (1, 1.0)
        advance()
        shutil.rmtree(folders[-1])
        with pytest.raises(TrainingError, match="no new checkpoint"):
            next(results)
        advance()
        results = evaluate_checkpoints(
            tmp_path, lambda parameters: parameters["a"].item(), last_step=3, poll_s=0.01, timeout_s=5
        )
        assert list(results) == [(3, 3.0)]
