"""Builds one rank's list where micro-batches of each stage come in order: say what is next, not which."""

from __future__ import annotations

from collections import Counter, deque

from outsize.plan.actions import Action, ActionKind

__all__ = ["RankActions"]


class RankActions:
    """A growing list of actions; each stage counts its own micro-batches, by kind."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._num_forwards: Counter[int] = Counter()
        self._num_backwards: Counter[int] = Counter()
        self._held_back: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        """Add the forward of the stage's next micro-batch."""
        self._actions.append(Action(stage, ActionKind.FORWARD, self._num_forwards[stage]))
        self._num_forwards[stage] += 1

    def backward(self, stage: int) -> None:
        """Add the full backward of the stage's next micro-batch."""
        self._add_backward(stage, ActionKind.FULL_BACKWARD)

    def input_gradient(self, stage: int) -> None:
        """Add the input gradient of the stage's next micro-batch, and hold back its weight gradient."""
        self._add_backward(stage, ActionKind.INPUT_GRADIENT)
        last = self._actions[-1]
        self._held_back.append(Action(stage, ActionKind.WEIGHT_GRADIENT, last.microbatch))

    def oldest_weight_gradient(self) -> None:
        """Add the weight gradient held back for longest, if any is."""
        if self._held_back:
            self._actions.append(self._held_back.popleft())

    def weight_gradient(self, stage: int) -> None:
        """Add the weight gradient held back for longest on this stage."""
        held = next(action for action in self._held_back if action.stage == stage)
        self._held_back.remove(held)
        self._actions.append(held)

    def finish(self, num_microbatches: int) -> tuple[Action, ...]:
        """Return the list with all weight gradients still held back, without surplus micro-batches."""
        actions = (*self._actions, *self._held_back)
        return tuple(action for action in actions if action.microbatch < num_microbatches)

    def _add_backward(self, stage: int, kind: ActionKind) -> None:
        self._actions.append(Action(stage, kind, self._num_backwards[stage]))
        self._num_backwards[stage] += 1
