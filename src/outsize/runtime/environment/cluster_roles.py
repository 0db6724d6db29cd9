"""Clusters described by roles (chief, workers, parameter servers, evaluator): who is chief, who has which id.

The rules are those of TensorFlow's ``multi_worker_util``, so that a job description means the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outsize.errors import LaunchError

__all__ = ["ROLES", "ClusterRoles"]

ROLES = ("chief", "worker", "ps", "evaluator")
_AT_MOST_ONE = ("chief", "evaluator")


@dataclass(frozen=True)
class ClusterRoles:
    """The address of every known task: ``addresses[role][index]``; a sparse cluster knows only some."""

    addresses: Mapping[str, Mapping[int, str]]

    def __post_init__(self) -> None:
        for role, tasks in self.addresses.items():
            if role not in ROLES:
                raise LaunchError(f"unknown role {role!r} in the cluster", attempt=f"use {', '.join(ROLES)}")
            if role in _AT_MOST_ONE and len(tasks) > 1:
                raise LaunchError(f"the cluster has {len(tasks)} tasks of role {role}", why="there is one")

    def count(self, role: str) -> int:
        """Return the number of tasks of a role; in a sparse cluster, of those that must exist."""
        return max(self.addresses.get(role, {}), default=-1) + 1

    def check_task(self, role: str, index: int) -> None:
        """Refuse a task that this cluster cannot have; an evaluator may stand outside it.

        Raises:
            LaunchError: the role is unknown, is missing from the cluster, or has no such index.
        """
        if role not in ROLES:
            raise LaunchError(f"unknown role {role!r} of this task", attempt=f"use {', '.join(ROLES)}")
        if role == "evaluator" and not self.count("evaluator"):
            return
        if not self.count(role):
            raise LaunchError(f"this task is a {role}, but the cluster lists none")
        if not 0 <= index < self.count(role):
            raise LaunchError(f"this task is {role} {index}, but the cluster lists {self.count(role)}")

    def is_chief(self, role: str, index: int) -> bool:
        """Whether the task is the one that saves: the chief, else worker 0; an evaluator is its own chief."""
        self.check_task(role, index)
        if role == "worker":
            return index == 0 and not self.count("chief")
        return role in ("chief", "evaluator")

    def task_id(self, role: str, index: int) -> int:
        """Return the rank among the tasks that train: the chief first, then workers; elsewhere the index."""
        self.check_task(role, index)
        return self.count("chief") + index if role == "worker" else index

    def num_training_tasks(self, role: str) -> int:
        """Return how many tasks train together with this role: chief and workers; an evaluator alone."""
        return 1 if role == "evaluator" else self.count("chief") + self.count("worker")

    def master(self, role: str, index: int) -> str:
        """Return the address where all meet: the chief's, else worker 0's; an evaluator's own, if known."""
        if role == "evaluator":
            return self.addresses.get(role, {}).get(index, "127.0.0.1")
        for first in ("chief", "worker"):
            if 0 in self.addresses.get(first, {}):
                return self.addresses[first][0]
        raise LaunchError(
            "the cluster has no meeting point",
            why="it lists neither a chief nor worker 0 with an address",
            attempt="add a chief to the cluster",
        )
