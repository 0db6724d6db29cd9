"""Operators that make one value of several samples: over micro-batches they see only some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from outsize.model.program import Node, Program
from outsize.model.sample_dims import SampleDims

__all__ = ["is_row_wise", "mixing_nodes"]

aten = torch.ops.aten

_KEEP_ROWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default,
    aten._to_copy.default, aten.squeeze.default, aten.detach.default, aten.expand.default,
    aten.constant_pad_nd.default, aten.embedding.default, aten.native_dropout.default,
    aten.zeros_like.default, aten.ones_like.default,
}  # fmt: skip
_ALONG_A_DIM = {
    aten._softmax.default, aten._log_softmax.default, aten.softmax.int, aten.log_softmax.int,
    aten.cumsum.default, aten.cumprod.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default,
}  # fmt: skip
_SCANS = {
    aten._softmax.default, aten._log_softmax.default, aten.softmax.int, aten.log_softmax.int,
    aten.cumsum.default, aten.cumprod.default,
}  # fmt: skip
_PRODUCTS_WITH_WEIGHTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten.matmul.default}
_LOSSES_BY_ELEMENT = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def is_row_wise(program: Program, index: int, dims: SampleDims) -> bool:
    """Tell whether an operator surely keeps samples apart; needs one recording only, and may miss some."""
    node = program.nodes[index]
    if node.target in _KEEP_ROWS or (torch.Tag.pointwise in getattr(node.target, "tags", ())):
        return True
    if node.target in _ALONG_A_DIM:
        return _dim(program, node) != 0
    if node.target in _LOSSES_BY_ELEMENT:
        return bool(node.arguments[3] == 0)
    return (
        node.target in _PRODUCTS_WITH_WEIGHTS
        and sum(dims.reads_samples(value) for value in node.inputs) == 1
        and not dims.reads_samples(node.inputs[-1])
    )


def mixing_nodes(program: Program, indices: Iterable[int], dims: SampleDims) -> Iterator[int]:
    """Yield those of ``indices`` where samples meet: a dim that counts them goes, or meets another one."""
    used = {value for node in program.nodes for value in node.inputs}
    for index in indices:
        node = program.nodes[index]
        before = [dims.grown(value) for value in node.inputs if dims.reads_samples(value)]
        most = max(map(len, before), default=0)
        after = [len(dims.grown(value)) for value in node.outputs if value in used]
        along = node.target in _SCANS and _dim(program, node) in dims.grown(node.inputs[0])
        if most and (along or any(num != most for num in after)):
            yield index


def _dim(program: Program, node: Node) -> int:
    dim = int(node.arguments[1]) if len(node.arguments) > 1 else 0
    num_dims = len(program.specs[node.inputs[0]].shape)
    return dim % (num_dims + (node.target is aten.unsqueeze.default)) if num_dims else dim
