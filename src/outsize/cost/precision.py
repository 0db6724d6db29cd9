"""Bytes per parameter and per value for a precision and an optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import PlanError
from outsize.plan.plan import OptimizerSpec

__all__ = ["PRECISION_NAMES", "BytesPerParameter", "bytes_per_parameter", "element_bytes"]

# Computing in 16 bits keeps a float32 master copy of the parameters beside the optimizer's moments.
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
PRECISION_NAMES = tuple(_ELEMENT_BYTES)


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes that one trainable parameter takes: fp32 AdamW 4 + 4 + 8, 16-bit AdamW 2 + 2 + 12."""

    parameter: float
    gradient: float
    optimizer_state: float
    update: float = 0.0  # of the one parameter that the optimizer is at, beside its state

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.parameter + self.gradient + self.optimizer_state


def element_bytes(precision: str) -> int:
    """Return the bytes of an activation.

    Raises:
        PlanError: the precision is unknown.
    """
    if precision not in _ELEMENT_BYTES:
        raise PlanError(f"No precision is called {precision!r}.", attempt=", ".join(PRECISION_NAMES))
    return _ELEMENT_BYTES[precision]


def bytes_per_parameter(precision: str, optimizer: OptimizerSpec) -> BytesPerParameter:
    """Return the bytes of a trainable parameter, its gradient and its optimizer state.

    Raises:
        PlanError: the precision or the optimizer is unknown.
    """
    width = element_bytes(precision)
    state_width = max(width, 4)
    num_states = {"adamw": 2, "adam": 2, "sgd": 1 if optimizer.momentum else 0}
    if optimizer.name not in num_states:
        raise PlanError(f"No optimizer is called {optimizer.name!r}.", attempt=", ".join(num_states))
    master = state_width if width < 4 else 0
    return BytesPerParameter(
        parameter=width,
        gradient=width,
        optimizer_state=num_states[optimizer.name] * state_width + master,
        update=_num_temporaries(optimizer) * state_width,
    )


def _num_temporaries(optimizer: OptimizerSpec) -> int:
    """Tensors like a parameter that its update makes.

    torch's Adam makes a root and a quotient while it still has the quotient of the parameter before; decay
    that is added to the gradient makes one more.
    """
    decays_gradient = optimizer.weight_decay != 0 and optimizer.name != "adamw"
    return (3 if optimizer.name in {"adamw", "adam"} else 0) + decays_gradient
