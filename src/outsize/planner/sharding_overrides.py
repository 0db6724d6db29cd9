"""What a user decides about operator splits: placements of parameters, and what stays whole."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from outsize.errors import PlanError
from outsize.model.operator_rules.placement import Partial, Placement, Replicate, Shard, parse_placement
from outsize.model.program import NodeKind, Program

__all__ = ["ShardingOverrides", "decided_placements", "load_sharding_overrides"]

_WHOLE = "R"


@dataclass(frozen=True, slots=True)
class ShardingOverrides:
    """Decisions by name pattern, with ``*`` for anything, dots too.

    ``placements``: pattern of parameter names -> ``R`` (whole), ``S0`` (divided along dim 0, in whichever
    way the operators need), or an exact placement such as ``S1[384]/6``. ``never_split``: patterns of modules
    whose operators and parameters stay whole.
    """

    placements: Mapping[str, str] = field(default_factory=dict)
    never_split: Sequence[str] = ()

    def decisions(self, program: Program, nodes: Sequence[int]) -> dict[int, str]:
        """Return the placement of each node decided: of a parameter, or ``R`` for an operator to run whole.

        Raises:
            PlanError: a pattern matches nothing, two match a parameter, or a placement cannot be read.
        """
        for text in self.placements.values():
            _parsed(text)
        patterns: dict[str, str] = {**self.placements, **dict.fromkeys(self.never_split, _WHOLE)}
        unused = dict.fromkeys(patterns)
        found: dict[int, str] = {}
        for index in nodes:
            matching = self._matching(program, index)
            if len(matching) > 1 and not set(matching) <= set(self.never_split):
                raise PlanError(
                    f"More than one pattern matches {program.nodes[index].target}.",
                    why=", ".join(f"{pattern!r} says {patterns[pattern]}" for pattern in matching),
                    attempt="patterns of which one matches each name",
                )
            if matching:
                found[index] = patterns[matching[0]]
            for pattern in matching:
                unused.pop(pattern, None)
        if unused:
            raise _nothing_matches(
                next(iter(unused)), program, is_module=next(iter(unused)) in self.never_split
            )
        return found

    def _matching(self, program: Program, index: int) -> list[str]:
        node = program.nodes[index]
        if node.kind is NodeKind.PARAMETER:
            name = str(node.target)
            named = [pattern for pattern in self.placements if fnmatchcase(name, pattern)]
            return named + [pattern for pattern in self.never_split if _is_inside(name, pattern)]
        if node.kind is NodeKind.OPERATOR:
            return [pattern for pattern in self.never_split if _is_inside(node.module_path, pattern)]
        return []


def decided_placements(
    name: str, text: str, shape: tuple[int, ...], wished: Sequence[Placement], degree: int
) -> list[Placement]:
    """Return the placements that ``text`` leaves open for a parameter; ``wished`` are those its readers need.

    Raises:
        PlanError: a parameter of this shape cannot be placed so.
    """
    placement = _parsed(text)
    if isinstance(placement, Replicate):
        return [placement]
    assert isinstance(placement, Shard)
    is_exact = bool(placement.segments)
    alike = [
        w
        for w in wished
        if isinstance(w, Shard) and w.dim == placement.dim and (not is_exact or w == placement)
    ]
    if alike:
        return list(alike)
    if placement.dim < len(shape) and not is_exact and not placement.fits(shape, degree):
        placement = Shard(placement.dim, (shape[placement.dim],))
    if not placement.fits(shape, degree):
        raise PlanError(
            f"{name} cannot be placed as {text} over {degree} devices.",
            why=f"its shape is {'x'.join(map(str, shape))}",
            attempt="one of " + ", ".join(dict.fromkeys(["R", *map(str, wished)])),
        )
    return [placement]


def load_sharding_overrides(path: Path) -> ShardingOverrides:
    """Read a TOML file with a table ``[placements]`` and a list ``never_split``.

    Raises:
        PlanError: it cannot be read, or holds something else.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read.", why=str(error.strerror)) from None
    except ValueError as error:
        raise PlanError(f"{path} is not TOML.", why=str(error)) from None
    placements, never_split = values.pop("placements", {}), values.pop("never_split", [])
    is_right = (
        not values
        and isinstance(placements, dict)
        and isinstance(never_split, list)
        and all(isinstance(text, str) for text in (*placements.values(), *never_split))
    )
    if not is_right:
        raise PlanError(
            f"{path} holds no operator placements.",
            why=f"unknown: {', '.join(values)}" if values else "a value is not text",
            attempt='never_split = ["lm_head"] and below [placements] lines such as "*.up.weight" = "S0"',
        )
    return ShardingOverrides(placements, tuple(never_split))


def _is_inside(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _parsed(text: str) -> Placement:
    try:
        placement = parse_placement(text)
    except ValueError:
        placement = Partial()
    if isinstance(placement, Partial) or placement == Replicate(partial_gradient=True):
        raise PlanError(
            f"{text!r} is no placement of a parameter.", attempt="R for whole, S0 for divided along dim 0"
        )
    return placement


def _nothing_matches(pattern: str, program: Program, *, is_module: bool) -> PlanError:
    if is_module:
        names = {node.module_path for _, node in program.nodes_of_kind(NodeKind.OPERATOR)}
    else:
        names = {str(node.target) for _, node in program.nodes_of_kind(NodeKind.PARAMETER)}
    some = sorted(names - {""})[:4]
    what = "module" if is_module else "parameter"
    return PlanError(f"No {what} matches {pattern!r}.", why=f"there are {', '.join(some)} and so on")
