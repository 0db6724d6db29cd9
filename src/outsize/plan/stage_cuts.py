"""Checks the cuts that a user pins against those a model has, and names legal ones nearby."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence

from outsize.errors import PlanError

__all__ = ["check_cuts"]

_NUM_NAMED = 4


def check_cuts(cuts: Sequence[str], legal: Sequence[str]) -> None:
    """Check that stages may begin at ``cuts``; ``legal`` are all places where one may, in the model's order.

    Raises:
        PlanError: a cut is no legal one (some near it are named), is there twice, or is out of order.
    """
    for cut in cuts:
        if cut not in legal:
            near = _nearby(cut, legal)
            raise PlanError(
                f"The model cannot be cut at {cut!r}.",
                why=f"A stage may begin at {len(legal)} blocks, so that none is empty and none writes into "
                f"what another holds; {cut!r} is not one."
                if legal
                else "It is one block, its blocks share a buffer, or it writes into what its first one made.",
                attempt=f"a stage that begins at {_either(near)}." if near else "one stage.",
            )
        if list(cuts).count(cut) > 1:
            raise PlanError(f"The stage cut {cut!r} is there twice.", attempt="each cut once.")
    for one, other in itertools.pairwise(cuts):
        if legal.index(one) > legal.index(other):
            raise PlanError(
                "The stage cuts are not in the model's order.",
                why=f"{one!r} comes after {other!r} in the model.",
                attempt=", ".join(sorted(cuts, key=legal.index)) + ".",
            )


def _nearby(cut: str, legal: Sequence[str]) -> list[str]:
    """Return up to four legal cuts: of the same form with the nearest numbers, else with a similar name."""
    alike = [label for label in legal if _form(label) == _form(cut)]
    if alike:
        near = sorted(alike, key=lambda label: _distances(label, cut))[:_NUM_NAMED]
    else:
        near = difflib.get_close_matches(cut, legal, _NUM_NAMED, cutoff=0.5) or list(legal[:_NUM_NAMED])
    return sorted(near, key=legal.index)


def _form(label: str) -> str:
    return re.sub(r"\d+", "#", label)


def _distances(label: str, other: str) -> list[int]:
    pairs = zip(re.findall(r"\d+", label), re.findall(r"\d+", other), strict=True)
    return [abs(int(one) - int(two)) for one, two in pairs]


def _either(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} or {labels[-1]}"
