"""Numbers of a batch that name a row of a table or a class: those that do not exist are refused by name.

    input_ids ──▶ embedding [1000 rows]          0 ... 999
    labels ─────▶ cross entropy [5 classes]      0 ... 4, and ignore_index

Otherwise the one process whose stage looks them up would fail, and the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outsize.errors import BatchError
from outsize.model.loss_elements import evaluate_from_batch
from outsize.model.program import IndexRange, Node, NodeKind, Program, Ref
from outsize.model.recorder import Recorder

__all__ = ["Lookup", "check_index_ranges", "find_index_ranges", "lookups_noted"]

aten = torch.ops.aten
_LABEL_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_TABLES = (aten.embedding.default,)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A call of an embedding module, perhaps inside a block that is recorded whole."""

    indices: torch.Tensor
    num_rows: int
    name: str
    at: int  # node


@contextmanager
def lookups_noted(recorder: Recorder, module: nn.Module) -> Iterator[list[Lookup]]:
    """Note every call of an embedding module while inside."""
    lookups: list[Lookup] = []

    def note(name: str) -> Callable[..., None]:
        def hook(table: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            indices = args[0] if args else kwargs.get("input")
            if isinstance(indices, torch.Tensor):
                lookups.append(Lookup(indices, table.num_embeddings, name, len(recorder.nodes)))

        return hook

    handles = [
        part.register_forward_pre_hook(note(name or "the embedding"), with_kwargs=True)
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    try:
        yield lookups
    finally:
        for handle in handles:
            handle.remove()


def find_index_ranges(
    program: Program, lookups: list[Lookup], tensors: Mapping[int, torch.Tensor]
) -> tuple[IndexRange, ...]:
    """Return what is looked up by numbers that follow from the batch alone; ``tensors`` are by value."""
    values = {id(tensor): value for value, tensor in tensors.items()}
    found = [
        IndexRange(values[id(each.indices)], each.num_rows, f"{each.name} has {each.num_rows} rows", each.at)
        for each in lookups
        if id(each.indices) in values
    ]
    for at, node in program.nodes_of_kind(NodeKind.OPERATOR):
        found += _of_operator(program, node, at)
    entries = _entries_behind(program)
    by_place = {(each.value, each.size): each for each in reversed(found)}  # the first of several
    return tuple(
        IndexRange(each.value, each.size, each.reason, each.at, each.ignored, entries[each.value])
        for each in reversed(by_place.values())
        if each.value in entries
    )


def _of_operator(program: Program, node: Node, at: int) -> Iterator[IndexRange]:
    if node.target in _TABLES:
        table, indices = _references(node)
        (size, *_) = program.specs[table].shape
        where = node.module_path or "the model"
        yield IndexRange(indices, size, f"the table that {where} looks them up in has {size} rows", at)
    elif node.target in _LABEL_LOSSES:
        scores, labels = _references(node)
        shape = program.specs[scores].shape
        size = shape[1] if len(shape) > 1 else shape[0]
        ignored = int(node.arguments[4])
        yield IndexRange(labels, size, f"the loss has {size} classes, and leaves out {ignored}", at, ignored)


def _references(node: Node) -> tuple[int, int]:
    first, second = node.arguments[:2]
    assert isinstance(first, Ref)
    assert isinstance(second, Ref)
    return first.value, second.value


def _entries_behind(program: Program) -> dict[int, tuple[str, ...]]:
    """Return for each value that follows from the batch alone the entries that it follows from."""
    spoiled: set[int] = set()  # memory that something else writes into
    while True:
        entries: dict[int, tuple[str, ...]] = {}
        for node in program.nodes:
            own = (str(node.target),) if node.kind is NodeKind.INPUT else ()
            known = _is_computable(node) and all(value in entries for value in node.inputs)
            if known and not any(program.storages[value] in spoiled for value in node.outputs):
                behind = tuple(dict.fromkeys((*own, *(name for v in node.inputs for name in entries[v]))))
                entries |= dict.fromkeys(node.outputs, behind)
        written = {
            program.storages[value]
            for node in program.nodes
            for value in node.mutates
            if not (_is_computable(node) and all(each in entries for each in node.inputs))
        }
        if written <= spoiled:
            return entries
        spoiled |= written


def _is_computable(node: Node) -> bool:
    return node.kind in (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.OPERATOR) and not node.is_random


def check_index_ranges(program: Program, entries: Mapping[str, torch.Tensor]) -> None:
    """Refuse a batch, of the recorded shapes, that names a row or a class that does not exist.

    Raises:
        BatchError: with the entry, the number and the size of the table.
    """
    for each in program.index_ranges:
        indices = evaluate_from_batch(program, each.value, entries, before=each.at)
        wrong = (indices < 0) | (indices >= each.size)
        if each.ignored is not None:
            wrong &= indices != each.ignored
        if wrong.any():
            raise _out_of_range(each, int(indices[wrong][0]))


def _out_of_range(each: IndexRange, number: int) -> BatchError:
    names = " and ".join(map(repr, each.entries))
    holder = f"Batch entry {names} holds" if len(each.entries) == 1 else f"What follows from {names} is"
    if not each.entries:  # positions, counted from the shape
        return BatchError(
            f"The forward looks up number {number}, which is out of range.",
            why=f"{each.reason}: numbers 0 to {each.size - 1}.",
            attempt="shorter samples, or a model with a larger table.",
        )
    return BatchError(
        f"{holder} {number}, which is out of range.",
        why=f"{each.reason}: numbers 0 to {each.size - 1}.",
        attempt="data made for this model, such as by a tokenizer of its vocabulary.",
    )
