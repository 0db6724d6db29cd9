"""What each rank keeps while a schedule runs; depends on the order of its own actions only, not on times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.plan.actions import ActionKind, Schedule

__all__ = ["StageActivations", "peak_activation_bytes", "peak_microbatches_in_flight"]


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes one micro-batch keeps on one stage.

    ``forward_bytes`` from F until B or I; from I until W ``weight_gradient_bytes`` of them are still kept
    (the inputs and output gradients of the weight gradients: M_W beside M_B in the Zero Bubble paper).
    """

    forward_bytes: int
    weight_gradient_bytes: int


def peak_microbatches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, by rank, the most (stage, micro-batch) pairs whose F has run and whose B or W has not."""
    one = (StageActivations(1, 1),) * schedule.num_stages
    return peak_activation_bytes(schedule, one)


def peak_activation_bytes(schedule: Schedule, activations: Sequence[StageActivations]) -> tuple[int, ...]:
    """Return the peak of kept activation bytes by rank; ``activations`` has one entry a stage."""
    change = [
        {
            ActionKind.FORWARD: stage.forward_bytes,
            ActionKind.FULL_BACKWARD: -stage.forward_bytes,
            ActionKind.INPUT_GRADIENT: stage.weight_gradient_bytes - stage.forward_bytes,
            ActionKind.WEIGHT_GRADIENT: -stage.weight_gradient_bytes,
        }
        for stage in activations
    ]
    peaks = []
    for actions in schedule.actions:
        kept = peak = 0
        for action in actions:
            kept += change[action.stage][action.kind]
            peak = max(peak, kept)
        peaks.append(peak)
    return tuple(peaks)
