"""Why a strategy is right, wrong or impossible: reason codes, and what they mean in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Reason", "ReasonCode"]


class ReasonCode(StrEnum):
    """What decides a verdict."""

    FITS = "FITS"  # fits, and nothing speaks against it
    STATE_TOO_BIG = "STATE_TOO_BIG"  # parameters, gradients and optimizer states exceed a device
    ACT_TOO_BIG = "ACT_TOO_BIG"  # state fits, activations do not, even for one sample
    UNIT_TOO_BIG = "UNIT_TOO_BIG"  # one block alone exceeds a device
    ONE_HOST_ONLY = "ONE_HOST_ONLY"  # the cluster has several machines, the strategy one
    MANY_HOSTS = "MANY_HOSTS"  # the cluster has one machine, the strategy is for several
    ONE_DEVICE = "ONE_DEVICE"  # there is nothing to split over
    UNEVEN_DEVICES = "UNEVEN_DEVICES"
    LINK_TOO_SLOW = "LINK_TOO_SLOW"  # most of the step is communication
    SERVER_SATURATED = "SERVER_SATURATED"
    NOT_DIVISIBLE = "NOT_DIVISIBLE"  # batch, heads or widths do not divide
    NOT_A_CHAIN = "NOT_A_CHAIN"  # the model has no cut
    STAGES_UNBALANCED = "STAGES_UNBALANCED"  # the slowest stage takes far longer than the mean


@dataclass(frozen=True, slots=True)
class Reason:
    """A code with the sentence that gives its numbers."""

    code: ReasonCode
    text: str
