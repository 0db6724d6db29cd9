"""What failures cost a long job: the best checkpoint interval and the share of time that is progress.

Failures of devices are taken as independent and memoryless, so N devices of mean time between failures
M_1 fail every M = M_1 / N. With checkpoints of δ seconds every τ of work and R seconds to restart, the
expected time for τ of work is (Daly 2006, equation 20)

    M e^{R/M} (e^{(τ + δ)/M} - 1)

and the best interval is close to  τ = sqrt(2 δ M) (1 + 1/3 sqrt(δ / 2M) + δ / 18M) - δ  (equation 37),
whose first term is Young's (1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.plan.plan import Plan

__all__ = ["Goodput", "best_checkpoint_interval_s", "estimate_goodput", "goodput_of_plan", "goodput_share"]


# Where nothing else is known: each device writes its part of a checkpoint at this rate, and a job that
# lost a device runs again after this time.
CHECKPOINT_BYTES_PER_S = 1e9
RESTART_S = 300.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """How a job fares with failures. ``share`` of the time is work that is kept."""

    mean_time_between_failures_s: float
    checkpoint_s: float
    restart_s: float
    checkpoint_interval_s: float
    share: float


def best_checkpoint_interval_s(checkpoint_s: float, mean_time_between_failures_s: float) -> float:
    """Return seconds of work between checkpoints that lose least (Daly's higher-order estimate)."""
    mean = mean_time_between_failures_s
    if checkpoint_s >= 2 * mean:
        return mean
    ratio = math.sqrt(checkpoint_s / (2 * mean))
    return math.sqrt(2 * checkpoint_s * mean) * (1 + ratio / 3 + ratio**2 / 9) - checkpoint_s


def goodput_share(
    interval_s: float, *, checkpoint_s: float, restart_s: float, mean_time_between_failures_s: float
) -> float:
    """Return work ÷ expected time for checkpoints every ``interval_s`` of work."""
    mean = mean_time_between_failures_s
    exponent = (interval_s + checkpoint_s) / mean
    if exponent > 700:  # beyond float64: no interval is ever finished
        return 0.0
    return interval_s / (mean * math.exp(min(restart_s / mean, 700)) * math.expm1(exponent))


def estimate_goodput(
    num_devices: int, *, device_mtbf_hours: float, checkpoint_s: float, restart_s: float
) -> Goodput:
    """Return interval and goodput of a job on ``num_devices`` that must all work.

    Raises:
        OutsizeError: a time or the number of devices is not positive.
    """
    if num_devices < 1 or not 0 < device_mtbf_hours < math.inf or checkpoint_s <= 0 or restart_s < 0:
        raise OutsizeError(
            "Goodput needs devices, hours between failures and seconds a checkpoint above zero.",
            why=f"{num_devices} devices, {device_mtbf_hours} h, {checkpoint_s} s, restart {restart_s} s",
            attempt="a number of hours, such as 50000",
        )
    mean = device_mtbf_hours * 3600 / num_devices
    interval = best_checkpoint_interval_s(checkpoint_s, mean)
    share = goodput_share(
        interval, checkpoint_s=checkpoint_s, restart_s=restart_s, mean_time_between_failures_s=mean
    )
    return Goodput(mean, checkpoint_s, restart_s, interval, share)


def goodput_of_plan(plan: Plan, *, device_mtbf_hours: float) -> Goodput:
    """Return the goodput of a planned job whose devices each fail every ``device_mtbf_hours``.

    A checkpoint is as slow as the device that holds most parameters and optimizer states.

    Raises:
        OutsizeError: the plan holds no prediction, or the hours are not positive.
    """
    if plan.prediction is None:
        raise OutsizeError("The plan holds no prediction.", attempt="plan again")
    largest = max(each["parameters"] + each["optimizer_states"] for each in plan.prediction.memory_by_rank)
    return estimate_goodput(
        plan.mesh.world_size,
        device_mtbf_hours=device_mtbf_hours,
        checkpoint_s=largest / CHECKPOINT_BYTES_PER_S,
        restart_s=RESTART_S,
    )
