"""What a device holds of the model's state, and what stands beside it for a moment in each step.

Memory is highest at one of three times, which do not overlap:

    backward     activations and temporaries of a micro-batch, and messages that go out meanwhile
    reduction    gradients on their way between replicas, when activations are gone
    update       what the optimizer computes with; then updated parameters on their way, without gradients

Everything may be a number or an array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.cost.layout import Layout
from outsize.cost.precision import BytesPerParameter
from outsize.units import MIB

__all__ = ["HeldParameters", "StateBytes", "estimate_state"]

BUCKET_BYTES = 25 * MIB  # of gradients, or of updated parameters, on their way at a time


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """Counts of the parameters that a device uses, before any is divided over replicas."""

    all: Any
    trainable: Any
    in_largest_block: Any
    in_largest: Any  # of single parameters


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes held all the time, gathered blocks included, and what stands beside them for a moment."""

    parameters: Any
    gradients: Any
    optimizer_states: Any
    in_backward: Any = 0.0  # messages, beside activations and temporaries
    in_reduction: Any = 0.0  # messages
    in_update: Any = 0.0  # what the optimizer computes with
    in_gather: Any = 0.0  # messages, beyond the gradients that are gone then

    @property
    def total(self) -> Any:
        """Bytes held all the time."""
        return self.parameters + self.gradients + self.optimizer_states

    @property
    def after_backward(self) -> Any:
        """The most that stands beside the state when activations are gone."""
        return np.maximum(self.in_reduction, np.maximum(self.in_update, self.in_gather))

    def temporaries(self, activations: Any, of_blocks: Any) -> Any:
        """Return what computations need beside activations: those of blocks, or more for the optimizer."""
        return np.maximum(of_blocks, self.in_update - activations - self.in_backward)

    def messages(self, working: Any) -> Any:
        """Return the bytes needed beyond the state and ``working``: activations and temporaries."""
        return np.maximum(self.in_backward, np.maximum(self.in_reduction, self.in_gather) - working)


def estimate_state(held: HeldParameters, layout: Layout, per: BytesPerParameter) -> StateBytes:
    """Return the bytes of one device."""
    level = layout.state_sharding
    if level == "servers":
        return _served(held, per)
    if layout.num_state_shards == 1 or level == "none":
        return _whole(held, layout, per)
    return _sharded(held, layout, per)


def _served(held: HeldParameters, per: BytesPerParameter) -> StateBytes:
    """Parameter servers hold the optimizer's states; gradients leave as they are made."""
    gradients = held.trainable * per.gradient
    leaving = np.minimum(2.0 * BUCKET_BYTES, gradients)
    return StateBytes(held.all * per.parameter, gradients, 0.0 * gradients, in_backward=leaving)


def _whole(held: HeldParameters, layout: Layout, per: BytesPerParameter) -> StateBytes:
    """Every replica holds everything."""
    gradients = held.trainable * per.gradient
    has_replicas = layout.num_replicas > 1
    return StateBytes(
        held.all * per.parameter,
        gradients,
        held.trainable * per.optimizer_state,
        in_reduction=_bucket(gradients, held.in_largest * per.gradient) * has_replicas,
        in_update=held.in_largest * per.update,
    )


def _sharded(held: HeldParameters, layout: Layout, per: BytesPerParameter) -> StateBytes:
    """Ranks divide optimizer states, with ``gradients`` also these, with ``full`` also parameters.

    A message with everybody's shards stands beside this rank's own. Where gradients are divided, those of one
    block are whole; where parameters are, one block that computes is, while the next one arrives.
    """
    level, shards = layout.state_sharding, layout.num_state_shards
    with_own = 1 + 1 / shards
    parameters, gradients = held.all * per.parameter, held.trainable * per.gradient
    block = held.in_largest_block
    in_backward: Any = 0.0
    at_work: Any = 0.0  # whole blocks, which are gone after backward
    if level == "optimizer_states":
        in_reduction = with_own * _bucket(gradients, held.in_largest * per.gradient)
    else:
        gradients = gradients / shards
        in_reduction = _bucket(gradients, held.in_largest * per.gradient / shards)
        in_reduction = in_reduction * (layout.num_replicas > layout.mesh.fsdp)
        in_backward = with_own * block * per.gradient
        at_work = block * per.gradient
        gradients = gradients + at_work
    in_gather: Any = 0.0
    if level == "full":
        gathered_blocks = (1 + with_own) * block * per.parameter
        parameters = parameters / shards + gathered_blocks
        at_work = at_work + gathered_blocks
    else:
        gathered = _bucket(held.trainable * per.parameter, held.in_largest * per.parameter)
        in_gather = with_own * gathered - gradients
    return StateBytes(
        parameters,
        gradients,
        held.trainable * per.optimizer_state / shards,
        in_backward,
        in_reduction - at_work,
        held.in_largest * per.update / shards - at_work,
        in_gather,
    )


def _bucket(num_bytes: Any, largest: Any) -> Any:
    """Return the bytes that are on their way at a time, of ``num_bytes`` in all: no parameter is cut."""
    return np.minimum(np.maximum(BUCKET_BYTES, largest), num_bytes)
