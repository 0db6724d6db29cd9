"""Which parameters and buffers each pipeline rank holds: every one of the model is somewhere.

    first recording     rank 0: embedding, layers.0   rank 1: layers.2, head    used by their stages
    used by no stage    rank 0: layers.1                                        held beside its neighbour

The first recording decides it for good: what another one uses has to be there, where it is trained and saved.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from outsize.errors import PlanError
from outsize.model.deferred import DeferredModel
from outsize.runtime.materialise import names_used
from outsize.runtime.stage_placement import StagePlacement

__all__ = ["HeldNames"]


class HeldNames:
    """Full names by pipeline rank (of tied parameters the first), from the first recording's placement."""

    def __init__(self, deferred: DeferredModel, placement: StagePlacement) -> None:
        self._deferred = deferred
        self.recording = placement.recording
        self.by_rank = self._used_by_rank(placement)
        self._place_unused()

    def _used_by_rank(self, placement: StagePlacement) -> list[list[str]]:
        ties = self._deferred.ties
        return [
            [ties.get(name, name) for name in names_used(self._deferred, placement.slices_of(rank))]
            for rank in range(placement.schedule.num_ranks)
        ]

    def _place_unused(self) -> None:
        """Give what no stage uses to the rank that holds what the module has just before it."""
        holders = {name: rank for rank, names in reversed([*enumerate(self.by_rank)]) for name in names}
        ties = self._deferred.ties
        names = list(dict.fromkeys(ties.get(name, name) for name in _state_names(self._deferred.module)))
        rank = next((holders[name] for name in names if name in holders), 0)
        for name in names:
            if name in holders:
                rank = holders[name]
            else:
                self.by_rank[rank].append(name)

    def check(self, placement: StagePlacement) -> None:
        """Refuse a recording in which a rank uses what others hold, with values that it would not know.

        Raises:
            PlanError: names the first such parameter or buffer.
        """
        of_state = {self._deferred.ties.get(n, n) for n in _state_names(self._deferred.module)}
        for rank, names in enumerate(self._used_by_rank(placement)):
            missing = [name for name in names if name in of_state and name not in self.by_rank[rank]]
            if missing:
                mode = "training" if self._deferred.module.training else "evaluation"
                raise PlanError(
                    f"{missing[0]} is used on pipeline rank {rank} for this batch in {mode}, "
                    "and not held there.",
                    why="What each holds, and trains, follows from the sample batch in training.",
                    attempt="a sample batch that uses it there too, or cuts that keep its uses in one stage.",
                )


def _state_names(module: nn.Module) -> Iterator[str]:
    """Yield what a state dict has, in order; of a shared module under its first name."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        yield from (prefix + leaf for leaf, held in part._parameters.items() if held is not None)
        for leaf, buffer in part._buffers.items():
            if buffer is not None and leaf not in part._non_persistent_buffers_set:
                yield prefix + leaf
