"""Which description wins, what is logged, and each launcher read as it writes."""

from __future__ import annotations

import json
import logging

import pytest

from outsize.errors import LaunchError
from outsize.runtime.environment.outsize_variables import LaunchFlags
from outsize.runtime.environment.read_environment import read_environment

_KUBEFLOW_V1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "11", "WORLD_SIZE": "16",
    "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
}  # fmt: skip
_KUBEFLOW_V2 = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400",
}  # fmt: skip
_TF_CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
}
_CLUSTER_SPEC = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {
                "workerpool0": ["primary-0:2222"],
                "workerpool1": ["worker-0:2222", "worker-1:2222"],
                "workerpool2": ["server-0:2222"],
                "workerpool3": ["evaluator-0:2222"],
            },
            "environment": "cloud",
            "task": {"type": "workerpool1", "index": 1, "trial": "1"},
            "job": {},
        }
    )
}
_SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
_SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
_SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.9\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}  # fmt: skip
_JOBSET = {
    "JOBSET_NAME": "set", "REPLICATED_JOB_NAME": "node", "JOB_COMPLETION_INDEX": "1",
    "OUTSIZE_NUM_MACHINES": "2",
}  # fmt: skip
_LEADER_WORKER_SET = {"LWS_LEADER_ADDRESS": "lws-0.lws", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
_OUTSIZE = {"OUTSIZE_NUM_MACHINES": "2", "OUTSIZE_MACHINE_RANK": "1", "OUTSIZE_MASTER": "[fd00::1]:1234"}


@pytest.mark.parametrize(
    ("environ", "source", "master", "num_processes"),
    [
        (_TORCHRUN, "torchrun", ("n1", 29500), 8),
        (_OUTSIZE, "outsize_variables", ("fd00::1", 1234), 4),
        (_TF_CONFIG, "tf_config", ("a", 1), 4),
        (_KUBEFLOW_V1, "kubeflow_v1", ("job-master-0", 23456), 4),
        (_KUBEFLOW_V2, "kubeflow_v2", ("job-node-0-0.job", 29400), 8),
        (_SLURM, "slurm", ("n1", 20000), 4),
        (_SAGEMAKER, "sagemaker", ("algo-1", 2223), 8),
        (_SKYPILOT, "skypilot", ("10.0.0.9", 29500), 8),
        (_JOBSET, "jobset", ("set-node-0-0.set", 29500), 4),
        (_LEADER_WORKER_SET, "leader_worker_set", ("lws-0.lws", 29500), 4),
    ],
)
def test_every_launcher_of_two_machines_is_understood(
    environ: dict[str, str],
    source: str,
    master: tuple[str, int],
    num_processes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second of two machines, with 4 devices where the launcher does not count, said in one line."""
    with caplog.at_level(logging.INFO):
        found = read_environment(environ, processes_per_machine=4)
    assert (found.source, found.machine_rank, found.num_machines) == (source, 1, 2)
    assert (found.master_address, found.master_port) == master
    assert (found.processes_per_machine, found.world_size) == (num_processes, 2 * num_processes)
    assert [source in record.message for record in caplog.records] == [True]


def test_vertex_pools_are_roles() -> None:
    """Pool 0 is rank 0, pool 1 follows; servers and evaluators do not count."""
    found = read_environment(_CLUSTER_SPEC)
    assert (found.source, found.rank, found.world_size) == ("vertex_ai", 2, 3)
    assert (found.master_address, found.master_port) == ("primary-0", 2222)


def test_a_vertex_job_of_one_replica_has_only_a_cluster_spec() -> None:
    """Vertex sets TF_CONFIG only where there are several replicas."""
    spec = {"cluster": {"workerpool0": ["primary-0:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    found = read_environment({"CLUSTER_SPEC": json.dumps(spec)})
    assert (found.source, found.rank, found.world_size, found.role) == ("vertex_ai", 0, 1, "chief")


def test_an_unknown_vertex_pool_is_refused() -> None:
    """There are pools 0 to 3."""
    with pytest.raises(LaunchError, match="workerpool9"):
        read_environment({"CLUSTER_SPEC": json.dumps({"cluster": {"workerpool9": ["a:1"]}})})


def test_world_size_counts_pods_for_kubeflow_and_processes_for_torchrun() -> None:
    """The same WORLD_SIZE=2 is 16 processes of 8 a pod, or the two processes of one machine."""
    pods = read_environment(_KUBEFLOW_V1, processes_per_machine=8)
    processes = read_environment(_KUBEFLOW_V1 | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (pods.world_size, pods.num_machines, pods.rank) == (16, 2, None)
    assert (processes.world_size, processes.num_machines, processes.rank) == (2, 1, 1)


def test_the_pod_count_is_recognised_although_the_master_pod_is_told_localhost() -> None:
    """By hand on one machine the same variables would count processes."""
    local = _KUBEFLOW_V1 | {"MASTER_ADDR": "localhost", "RANK": "0"}
    pod = read_environment(local | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, processes_per_machine=8)
    by_hand = read_environment(local)
    assert (pod.source, pod.num_machines, pod.world_size) == ("kubeflow_v1", 2, 16)
    assert (by_hand.source, by_hand.num_machines, by_hand.local_rank) == ("rank_variables", 1, 0)


def test_a_process_of_torchrun_starts_no_others_whatever_else_is_set() -> None:
    """Inside a job with TF_CONFIG and flags the rank of torchrun stands."""
    found = read_environment(
        _TORCHRUN | _TF_CONFIG | _SLURM, flags=LaunchFlags(num_machines=2, machine_rank=1)
    )
    assert (found.source, found.rank, found.local_rank) == ("torchrun", 11, 3)


def test_processes_without_their_local_count_are_refused() -> None:
    """Eight ranks and a local rank may be any number of machines."""
    with pytest.raises(LaunchError, match="LOCAL_WORLD_SIZE"):
        read_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1"})


def test_the_order_is_flags_own_variables_tf_config_cluster_spec_ranks_and_so_on() -> None:
    """With everything set, removing the winner one by one gives the next in the documented order."""
    flags = LaunchFlags(num_machines=2, machine_rank=1, master="a:1")
    sources = [
        _OUTSIZE, _TF_CONFIG, _CLUSTER_SPEC, _KUBEFLOW_V1, _KUBEFLOW_V2, _SLURM, _SAGEMAKER, _SKYPILOT,
        _LEADER_WORKER_SET,
    ]  # fmt: skip
    found = [read_environment(dict(pair for one in sources for pair in one.items()), flags=flags).source]
    for first in range(len(sources)):
        environ = dict(pair for one in sources[first:] for pair in one.items())
        found.append(read_environment(environ).source)
    assert found == [
        "flags", "outsize_variables", "tf_config", "vertex_ai", "kubeflow_v1", "kubeflow_v2", "slurm",
        "sagemaker", "skypilot", "leader_worker_set",
    ]  # fmt: skip


def test_two_that_disagree_are_both_named(caplog: pytest.LogCaptureFixture) -> None:
    """Three machines by TF_CONFIG against two by SLURM, with both numbers."""
    config = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 1}}
    with caplog.at_level(logging.WARNING):
        read_environment({"TF_CONFIG": json.dumps(config)} | _SLURM)
    (record,) = caplog.records
    for part in ("tf_config", "slurm", "number of machines 3 against 2"):
        assert part in record.message


def test_launchers_that_nest_do_not_disagree(caplog: pytest.LogCaptureFixture) -> None:
    """torchrun with 8 processes inside one SLURM task a machine is how both are meant to be used."""
    with caplog.at_level(logging.WARNING):
        read_environment(_TORCHRUN | _SLURM | _KUBEFLOW_V2, processes_per_machine=1)
    assert caplog.records == []


def test_nothing_set_is_this_machine_alone() -> None:
    """A plain start trains on one machine, meeting on the loopback address."""
    found = read_environment({}, processes_per_machine=2)
    assert (found.source, found.world_size, found.rank) == ("single_machine", 2, None)
    assert found.master_address == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK"),
        (_KUBEFLOW_V1 | {"RANK": "2"}, "RANK is 2"),
        (_KUBEFLOW_V1 | {"MASTER_PORT": "http"}, "MASTER_PORT"),
        (_SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "algo-3"),
        (_SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS is not JSON"),
        (_SKYPILOT | {"SKYPILOT_NUM_NODES": "3"}, "lists 2 addresses"),
        (_OUTSIZE | {"OUTSIZE_MASTER": ""}, "no master address"),
        (_OUTSIZE | {"OUTSIZE_MACHINE_RANK": "2"}, "machine rank 2"),
        ({"JOBSET_NAME": "set", "JOB_COMPLETION_INDEX": "0"}, "OUTSIZE_NUM_MACHINES"),
        (_JOBSET | {"JOB_COMPLETION_INDEX": "2"}, "number 2"),
        (_LEADER_WORKER_SET | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE"),
    ],
)
def test_broken_descriptions_are_errors_that_name_the_variable(environ: dict[str, str], message: str) -> None:
    """Half a description is never completed by a guess."""
    with pytest.raises(LaunchError, match=message):
        read_environment(environ)
