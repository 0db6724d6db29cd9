"""Which values of two recordings are the same, where they differ early and end alike.

Torch records a batch of one sample in other operators than larger batches. Towards the loss both are alike:

    one sample     embed  view   mm  ...  log_softmax  nll_loss
    two samples    embed  clone  view  mm  ...  log_softmax  nll_loss
                                 └─ matched, from the end ────────┘
"""

from __future__ import annotations

from outsize.model.program import Node, Program, Ref

__all__ = ["match_tails"]


def match_tails(program: Program, other: Program) -> dict[int, int]:
    """Return for values of ``other`` those of ``program`` that the same last operators make or read."""
    found: dict[int, int] = {}
    for own, others in zip(reversed(program.nodes), reversed(other.nodes), strict=False):
        if not _are_alike(own, others):
            break
        found.update(zip(others.outputs, own.outputs, strict=True))
        found.update(zip(others.inputs, own.inputs, strict=True))
    return found


def _are_alike(first: Node, second: Node) -> bool:
    return (
        (first.kind, first.target, first.module_path) == (second.kind, second.target, second.module_path)
        and len(first.outputs) == len(second.outputs)
        and [isinstance(each, Ref) for each in first.arguments]
        == [isinstance(each, Ref) for each in second.arguments]
    )
