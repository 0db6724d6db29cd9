"""Tensor parallel: single operators divided over the devices (operator-level parallelism)."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.cost.layout import Job
from outsize.plan.plan import Mesh
from outsize.plan.reasons import Reason, ReasonCode
from outsize.strategies.base import Space, Strategy, tensor_degrees

__all__ = ["TensorParallel"]


class TensorParallel(Strategy):
    """Splits inside blocks; every block waits for collectives, so links must be fast."""

    name = "tensor_parallel"
    reached_for = "it divides everything, activations too, and has no idle time"
    right_when = (
        "a single block or its activations are too big for a device, heads and widths divide, "
        "and the devices share a fast link"
    )
    splits_state = True

    def refusal(self, job: Job) -> Reason | None:
        """One device, or operators that no degree divides."""
        if job.cluster.num_devices == 1:
            return Reason(ReasonCode.ONE_DEVICE, "one device has no other to divide operators with")
        if not tensor_degrees(job.profile, job.cluster.num_devices):
            return Reason(
                ReasonCode.NOT_DIVISIBLE,
                f"no operator of the model divides over 2 to {job.cluster.num_devices} devices",
            )
        return None

    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:  # noqa: ARG002
        """Yield the degrees that some operator can take, largest first."""
        for degree in reversed(tensor_degrees(job.profile, job.cluster.num_devices)):
            yield Mesh(tp=degree), "none"
