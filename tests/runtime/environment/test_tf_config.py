"""Every form of TF_CONFIG that is met in the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outsize.errors import LaunchError
from outsize.runtime.environment.tf_config import read_tf_config

_WORKERS = ["w0:2222", "w1:2222"]


def _environ(**config: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps(config)}


@pytest.mark.parametrize(
    "environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": '{"cluster": {}}'}]
)
def test_nothing_said_is_no_environment(environ: dict[str, str]) -> None:
    """Unset, empty, an empty object and an empty cluster all leave the decision to other readers."""
    assert read_tf_config(environ, 1) is None


@pytest.mark.parametrize("index", [1, "1"])
def test_the_index_may_be_a_number_or_text(index: object) -> None:
    """Launchers write both; the other keys TensorFlow knows are no obstacle."""
    environ = _environ(
        cluster={"chief": ["c:2222"], "worker": _WORKERS},
        task={"type": "worker", "index": index},
        rpc_layer="grpc",
        session_master="grpc://c:2222",
        environment="cloud",
    )
    found = read_tf_config(environ, 1)
    assert found is not None
    assert (found.rank, found.world_size, found.role) == (2, 3, "worker")
    assert (found.master_address, found.master_port) == ("c", 2222)


def test_several_processes_a_machine_multiply_the_world_and_leave_the_rank_open() -> None:
    """TF_CONFIG counts machines: with 4 devices each, two of them are a world of 8 still to be started."""
    found = read_tf_config(_environ(cluster={"worker": _WORKERS}, task={"type": "worker", "index": 1}), 4)
    assert found is not None
    assert (found.machine_rank, found.num_machines, found.world_size) == (1, 2, 8)
    assert found.rank is None
    assert found.local_rank is None


@pytest.mark.parametrize("listed", [{}, {"evaluator": ["e:2222"]}])
def test_an_evaluator_in_or_out_of_the_cluster_is_not_waited_for(listed: dict[str, list[str]]) -> None:
    """It is a group of one, and workers do not count it (tensorflow#46169, kubeflow/trainer#1213)."""
    cluster = {"chief": ["c:2222"], "worker": _WORKERS, **listed}
    evaluator = read_tf_config(_environ(cluster=cluster, task={"type": "evaluator", "index": 0}), 4)
    worker = read_tf_config(_environ(cluster=cluster, task={"type": "worker", "index": 0}), 1)
    assert evaluator is not None
    assert worker is not None
    assert (evaluator.role, evaluator.rank, evaluator.world_size) == ("evaluator", 0, 1)
    assert worker.world_size == 3


def test_a_server_is_not_a_training_rank() -> None:
    """Servers have an index of their own and no rank among chief and workers."""
    cluster = {"chief": ["c:2222"], "worker": _WORKERS, "ps": ["p0:2222", "p1:2222"]}
    found = read_tf_config(_environ(cluster=cluster, task={"type": "ps", "index": 1}), 4)
    assert found is not None
    assert (found.role, found.machine_rank, found.rank, found.world_size) == ("ps", 1, None, 3)


def test_a_sparse_cluster_maps_indices_to_addresses() -> None:
    """A dynamic TFJob shows a worker itself and the servers; number 2 means that there are three."""
    environ = _environ(
        sparseCluster={"chief": ["c:2222"], "worker": {"2": "w2:2222"}, "ps": ["p0:2222"]},
        task={"type": "worker", "index": 2},
    )
    found = read_tf_config(environ, 1)
    assert found is not None
    assert (found.rank, found.world_size) == (3, 4)
    assert found.cluster is not None
    assert found.cluster.addresses["worker"] == {2: "w2:2222"}


def test_the_older_name_of_the_chief_is_understood() -> None:
    """Vertex AI may call it master, as cluster key and as task type."""
    found = read_tf_config(
        _environ(cluster={"master": ["m:2222"], "worker": ["w:2222"]}, task={"type": "master", "index": 0}), 1
    )
    assert found is not None
    assert (found.role, found.rank, found.master_address) == ("chief", 0, "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"cluster": ', "TF_CONFIG is not JSON"),
        ("[]", "JSON list"),
        ('{"cluster": ["w0:1"]}', "not an object"),
        ('{"cluster": {"worker": "w0:1"}}', "neither a list nor a map"),
        ('{"cluster": {"worker": ["w0:1"]}, "task": {"type": "worker", "index": -1}}', "not a task index"),
        ('{"cluster": {"worker": ["w0:1"]}, "task": {"type": "worker", "index": 1}}', "lists 1"),
        ('{"cluster": {"worker": ["w0:1"]}, "task": "worker"}', "task in TF_CONFIG"),
        ('{"sparseCluster": {"worker": {"1": "w1:1"}}, "task": {"index": 1}}', "no meeting point"),
    ],
)
def test_what_cannot_be_read_is_a_named_error(text: str, message: str) -> None:
    """Every mistake is said in words, never as a traceback of the JSON parser."""
    with pytest.raises(LaunchError, match=message):
        read_tf_config({"TF_CONFIG": text}, 1)
