"""How pushes of workers become updates of the parameters, as a user says it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outsize.errors import PlanError
from outsize.plan.plan import OptimizerSpec
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.update_policy import UpdatePolicy

__all__ = ["Updates", "parse_updates"]

_FORMS = (
    "asynchronous; bounded:4 (staleness of at most 4 updates); synchronous; synchronous:1 (with one backup "
    "worker); local:8 (8 local steps between exchanges)"
)
_DEFAULT_AMOUNTS = {"asynchronous": 0, "synchronous": 0, "bounded": None, "local": None}
# Douillard et al. 2023 (DiLoCo), section 3.2: the outer optimizer
_OUTER_OPTIMIZER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@dataclass(frozen=True, slots=True)
class Updates:
    """A mode and its number: the bound, the backup workers, or the local steps.

    In every mode one update consumes whole global batches, so that a step means the same as in every other
    strategy: the batch of one push when asynchronous or bounded, else divided into parts, one a push.
    """

    mode: str  # "asynchronous", "bounded", "synchronous" or "local"
    amount: int = 0

    def check(self, num_workers: int) -> None:
        """Refuse numbers that do not go together.

        Raises:
            PlanError: as many backup workers as workers.
        """
        if self.mode == "synchronous" and self.amount >= num_workers:
            raise PlanError(
                f"{self.amount} of {num_workers} workers are to be backup workers.",
                why="An update needs the push of at least one worker.",
                attempt=f"synchronous:{num_workers - 1} at most, or more workers.",
            )

    def num_parts(self, num_workers: int) -> int:
        """Return the number of pushes that share one global batch."""
        return {"synchronous": num_workers - self.amount, "local": num_workers}.get(self.mode, 1)

    def policy(self, num_workers: int) -> UpdatePolicy:
        """Return what the servers do with pushes."""
        if self.mode == "asynchronous":
            return UpdatePolicy.asynchronous()
        if self.mode == "bounded":
            return UpdatePolicy.bounded_staleness(self.amount)
        return UpdatePolicy.synchronous(self.num_parts(num_workers))

    @property
    def steps_per_update(self) -> int:
        """Steps of the global batch that one update stands for."""
        return self.amount if self.mode == "local" else 1

    @property
    def are_exact(self) -> bool:
        """Whether every update is one process's on the whole global batch: then each waits for the last."""
        return self.mode == "local" or (self.mode == "synchronous" and not self.amount)

    def server_optimizer(self, spec: OptimizerSpec) -> OptimizerSettings:
        """Return what the servers run: with local steps DiLoCo's outer one, workers then run ``spec``."""
        if self.mode == "local":
            return OptimizerSettings("sgd", dict(_OUTER_OPTIMIZER))
        arguments = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
        if spec.name == "sgd":
            return OptimizerSettings("sgd", arguments | {"momentum": spec.momentum})
        return OptimizerSettings(spec.name, arguments | {"betas": spec.betas})


def parse_updates(text: str) -> Updates:
    """Return the mode that a text such as ``bounded:4`` names.

    Raises:
        PlanError: there is no such mode, or it lacks its number.
    """
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", text)
    mode = match[1] if match else ""
    if match is None or mode not in _DEFAULT_AMOUNTS:
        raise PlanError(f"{text!r} is not a way to update.", attempt=_FORMS)
    amount = int(match[2]) if match[2] else _DEFAULT_AMOUNTS[mode]
    if amount is None or (mode == "local" and amount < 1):
        raise PlanError(f"The updates {text!r} need a number.", attempt=_FORMS)
    if mode == "asynchronous" and amount:
        raise PlanError("Asynchronous updates take no number.", attempt=_FORMS)
    return Updates(mode, amount)
