"""How operator-level parallelism splits a program, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["REPLICATED", "UNUSED", "Sharding", "ShardingRule"]

REPLICATED = -1  # every rank runs the whole operator
UNUSED = -2  # nothing that is wanted depends on the node


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """How one operator runs on shards: placements as text (``R``, ``R~``, ``S1``, ``S2[8,8,8]``, ``P``).

    ``local_arguments`` are positions of sizes that become local sizes; ``kernel`` names the function that
    runs in place of the operator, where there is one.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    local_arguments: tuple[int, ...] = ()
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The split of one recorded program over ``degree`` ranks.

    ``choices[i]`` is what node ``i`` of the recording of operators does: a position in ``rules``,
    ``REPLICATED`` or ``UNUSED``. ``fingerprint`` names the sequence of operators this was decided for;
    shapes may differ in the batch. ``parameters`` are the placements of those that are split.
    ``evaluation`` is the split of the model in evaluation mode, where that runs other operators (no dropout).
    """

    degree: int
    rules: tuple[ShardingRule, ...]
    choices: tuple[int, ...]
    fingerprint: str
    parameters: dict[str, str] = field(default_factory=dict)
    evaluation: Sharding | None = None
