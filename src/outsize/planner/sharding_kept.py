"""Which values an operator-level split keeps for backward: found by asking autograd, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outsize.model.operator_rules.signature import OperatorSignature, signature_of
from outsize.model.program import NodeKind, Program

__all__ = ["kept_storages"]


def kept_storages(program: Program, nodes: Sequence[int]) -> set[int]:
    """Return the storages that backward of any of ``nodes`` reads, also those of parameters and inputs."""
    known: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
    kept: set[int] = set()
    for index in nodes:
        node = program.nodes[index]
        if node.kind is not NodeKind.OPERATOR:
            continue
        signature = signature_of(program, node)
        if signature.key not in known:
            known[signature.key] = _saved_positions(signature)
        inputs, outputs = known[signature.key]
        values = [node.inputs[position] for position in inputs]
        values += [node.outputs[position] for position in outputs]
        kept |= {program.storages[value] for value in values}
    return kept


def _saved_positions(signature: OperatorSignature) -> tuple[frozenset[int], frozenset[int]]:
    """Return which inputs and which outputs autograd saves; all, where the operator does not run on meta."""
    leaves = [
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad)
        for spec in signature.inputs
    ]
    given = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]  # may be written in place
    saved: list[torch.Tensor] = []  # held, so that no other storage takes the place of one

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, _unused):
            made = signature.call(given)
    except Exception:  # any refusal of meta tensors
        return frozenset(range(len(signature.inputs))), frozenset(range(len(signature.outputs)))
    return _positions_in(given, saved), _positions_in(made, saved)


def _positions_in(tensors: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> frozenset[int]:
    storages = {_storage_of(tensor) for tensor in saved}
    return frozenset(index for index, tensor in enumerate(tensors) if _storage_of(tensor) in storages)


def _storage_of(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _unused(packed: Any) -> Any:
    return packed
