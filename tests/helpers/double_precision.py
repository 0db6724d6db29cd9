"""Programs whose every computation is in float64, so that parity can be held to 1e-10."""

from dataclasses import replace

import torch

from outsize.model.program import Program

__all__ = ["in_double"]


def in_double(program: Program) -> Program:
    """Return the program with casts to float32 made casts to float64.

    Hugging Face models compute norms and losses in float32 whatever their parameters are.
    """
    nodes = [
        replace(
            node,
            arguments=tuple(torch.float64 if item is torch.float32 else item for item in node.arguments),
        )
        for node in program.nodes
    ]
    return replace(program, nodes=nodes)
