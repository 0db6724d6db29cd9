"""One rank's actions with split backwards: weight gradients held back until there is nothing better to do."""

from __future__ import annotations

from dataclasses import replace

from outsize.plan.actions import Action, ActionKind
from outsize.plan.schedules.interleaving import alternate, interleaved_actions

__all__ = ["split_backward_actions"]


def split_backward_actions(
    stages: range, num_microbatches: int, *, round_size: int, num_warmup: int, num_held_back: int
) -> tuple[Action, ...]:
    """Return warm-up, F I pairs while ``num_held_back`` Ws are saved up, then each I with the oldest W.

    ```
    2 of warm-up, 1 held back, 5 micro-batches:   F0 F1  F2 I0  F3 I1 W0  F4 I2 W1  I3 W2  I4 W3  W4
    ```
    """
    forwards = interleaved_actions(stages, ActionKind.FORWARD, num_microbatches, round_size)
    inputs = interleaved_actions(stages[::-1], ActionKind.INPUT_GRADIENT, num_microbatches, round_size)
    weights = iter([replace(action, kind=ActionKind.WEIGHT_GRADIENT) for action in inputs])
    actions: list[Action] = []
    num_inputs = 0
    for group in alternate(num_warmup, forwards, inputs):
        actions += group
        num_inputs += group[-1].kind is ActionKind.INPUT_GRADIENT
        if group[-1].kind is ActionKind.INPUT_GRADIENT and num_inputs > num_held_back:
            actions.append(next(weights))
    return (*actions, *weights)
