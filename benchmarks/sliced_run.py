"""Runs the slices of a program one after another in one process, as pipeline stages would, and compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outsize.model.batch_entries import flatten_batch
from outsize.model.program import Program, Ref
from outsize.model.record import loss_tensor
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule

__all__ = ["even_cuts", "gradients_of", "run_sliced", "worst_relative_error"]


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter name and clear them."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for parameter in module.parameters():
        parameter.grad = None
    return found


def run_whole(module: nn.Module, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of the module itself."""
    entries, layout = flatten_batch(batch)
    args, kwargs = layout.restore(entries)
    loss = loss_tensor(module(*args, **kwargs))
    assert loss is not None
    loss.backward()
    return float(loss.detach()), gradients_of(module)


def run_sliced(
    program: Program, cuts: Sequence[int], module: nn.Module, batch: Any
) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    """Return the loss, the gradients and the bytes sent over each cut.

    Stages share nothing but what they send: each value is detached, and its gradient handed back.
    """
    entries, _ = flatten_batch(batch)
    stages = [StageModule(program, part, module) for part in slice_program(program, cuts)]
    calls: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
    received: tuple[torch.Tensor, ...] = ()
    sent_bytes: list[int] = []
    for stage in stages:
        inputs = tuple(value.detach().requires_grad_(value.requires_grad) for value in received)
        output = stage(
            *(torch.ops.aten.alias(value) for value in inputs),
            **{name: entries[name] for name in stage.part.batch_entries},
        )
        sent = (loss_tensor(output),) if stage.part.is_last else output
        calls.append((inputs, sent))
        received = sent
        if not stage.part.is_last:
            sent_bytes.append(sum(value.numel() * value.element_size() for value in sent))
    calls[-1][1][0].backward()
    for (_, sent), (inputs, _) in zip(reversed(calls[:-1]), reversed(calls[1:]), strict=True):
        pairs = [
            (value, leaf.grad) for value, leaf in zip(sent, inputs, strict=True) if leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    return float(calls[-1][1][0].detach()), gradients_of(module), sent_bytes


def worst_relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a gradient over its largest value; infinite if one is missing."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(
        (
            float((found[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-300))
            for name, gradient in expected.items()
            if gradient.abs().max() > 0 or found[name].abs().max() > 0
        ),
        default=0.0,
    )


def even_cuts(
    program: Program, module: nn.Module, positions: Sequence[int], num_stages: int
) -> list[int] | None:
    """Choose cuts among ``positions`` that spread parameters evenly; None if there are too few."""
    if len(positions) < num_stages - 1:
        return None
    sizes = [0] * (len(program.nodes) + 1)
    for index, node in enumerate(program.nodes):
        own = module.get_submodule(str(node.target)).parameters() if node.kind == "module" else ()
        sizes[index + 1] = sizes[index] + sum(parameter.numel() for parameter in own)
    chosen: list[int] = []
    for stage in range(1, num_stages):
        left = [at for at in positions if not chosen or at > chosen[-1]]
        left = left[: len(left) - (num_stages - 1 - stage)] or left
        chosen.append(min(left, key=lambda at: abs(sizes[at] - sizes[-1] * stage / num_stages)))
    return chosen


def references(outputs: Sequence[Any]) -> list[int]:
    """Return the values among flattened outputs."""
    return [leaf.value for leaf in outputs if isinstance(leaf, Ref)]
