"""What all roles of a job agree on: layout, optimizer and policy, as plain data in the store."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outsize.runtime.parameter_server.layout import Layout
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.update_policy import UpdatePolicy

__all__ = ["SETTINGS_KEY", "Settings"]

SETTINGS_KEY = "settings"
"""Where the store keeps them; they appear once all servers hold their first values."""


@dataclass(frozen=True)
class Settings:
    """Everything a server or worker needs to know about the job.

    ``version_wait_s`` bounds how long a pull waits for a version that other workers still have to complete.
    ``steps_per_update`` are the steps of the global batch that one update stands for: more than one where
    workers take local steps.
    """

    layout: Layout
    optimizer: OptimizerSettings
    policy: UpdatePolicy
    version_wait_s: float = 60.0
    steps_per_update: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which ``from_json`` rebuilds the settings."""
        return {
            "layout": self.layout.to_json(),
            "optimizer": asdict(self.optimizer),
            "policy": asdict(self.policy),
            "version_wait_s": self.version_wait_s,
            "steps_per_update": self.steps_per_update,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        """Rebuild what ``to_json`` wrote."""
        return cls(
            Layout.from_json(data["layout"]),
            OptimizerSettings(**data["optimizer"]),
            UpdatePolicy(**data["policy"]),
            data["version_wait_s"],
            data["steps_per_update"],
        )
