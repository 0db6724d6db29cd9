"""Chief rules and ids; expected values measured on TensorFlow 2.21's multi_worker_util."""

from __future__ import annotations

import pytest

from outsize.errors import LaunchError
from outsize.runtime.environment.cluster_roles import ClusterRoles


def _cluster(**counts: int) -> ClusterRoles:
    return ClusterRoles(
        {role: {index: f"{role}{index}:2222" for index in range(count)} for role, count in counts.items()}
    )


@pytest.mark.parametrize(
    ("counts", "task", "is_chief", "task_id", "num_tasks"),
    [
        ({"chief": 1, "worker": 2}, ("worker", 1), False, 2, 3),
        ({"worker": 2}, ("worker", 0), True, 0, 2),
        ({"chief": 1, "worker": 1}, ("worker", 0), False, 1, 2),
        ({"chief": 1, "worker": 1}, ("chief", 0), True, 0, 2),
        ({"chief": 1, "worker": 2}, ("evaluator", 0), True, 0, 1),
        ({"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}, ("worker", 0), False, 1, 3),
    ],
)
def test_chief_and_ids_follow_the_rules_of_tensorflow(
    counts: dict[str, int], task: tuple[str, int], is_chief: bool, task_id: int, num_tasks: int
) -> None:
    """The chief counts as rank 0, workers follow, servers and evaluators do not count."""
    cluster = _cluster(**counts)
    assert cluster.is_chief(*task) == is_chief
    assert cluster.task_id(*task) == task_id
    assert cluster.num_training_tasks(task[0]) == num_tasks


@pytest.mark.parametrize("counts", [{"job": 1}, {"chief": 2}, {"worker": 1, "evaluator": 2}])
def test_impossible_clusters_are_refused(counts: dict[str, int]) -> None:
    """An unknown role, two chiefs and two evaluators."""
    with pytest.raises(LaunchError):
        _cluster(**counts)


@pytest.mark.parametrize("task", [("worker", 2), ("chief", 0), ("master", 0), ("ps", 0)])
def test_tasks_outside_the_cluster_are_refused(task: tuple[str, int]) -> None:
    """An index past the end, a role the cluster does not list, an unknown role."""
    with pytest.raises(LaunchError):
        _cluster(worker=2).check_task(*task)
