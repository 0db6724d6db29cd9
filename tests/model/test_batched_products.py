"""Products of more than three dims are split along their heads, whatever the batch."""

import torch
from torch import nn

from outsize.model.batched_products import unflatten_batched_products
from outsize.model.liveness import live_nodes
from outsize.model.operator_rules.discover import RuleFinder
from outsize.model.operator_rules.signature import signature_of
from outsize.model.program import NodeKind, Program
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule
from outsize.planner.sharding import plan_sharding

aten = torch.ops.aten


class Scores(nn.Module):
    """Attention written out, with a batch of three and four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project[:3])
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.project[3](mixed.transpose(1, 2).flatten(2)).square().mean()


class Weighted(nn.Module):
    """Products with weights kept as m x n, with a bias and without, and as n x m."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.plain = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.plain(self.linear(x))
        flat = torch.addmm(self.bias, hidden.view(-1, 4), self.weight)
        return flat.view(*hidden.shape[:-1], 6)


class Written(nn.Module):
    """A product whose right side is written after it was made, before its result is viewed."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        right = right.clone()
        kept = right[0]  # sees the write, which so stays one
        product = torch.bmm(left.view(4, 2, 3), right.view(4, 3, 5))
        right.zero_()
        return product.view(2, 2, 2, 5) + kept.sum()


def run(program: Program, module: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    stage = StageModule(program, slice_program(program, [])[0], module)
    return stage(**dict(zip(stage.part.batch_entries, batch, strict=True)))


def targets(program: Program) -> list[object]:
    return [program.nodes[index].target for index in live_nodes(program)]


def test_heads_are_split_at_any_batch_size():
    """All four products of a layer by heads, columns and rows: the result is the same to the last bit."""
    module, x = Scores(), torch.randn(3, 5, 32)
    program = record_module(module, x, granularity="operators")
    changed = unflatten_batched_products(program)
    assert targets(changed).count(aten.matmul.default) == targets(program).count(aten.bmm.default) == 2
    assert aten.bmm.default not in targets(changed)
    assert torch.equal(run(changed, module, x), run(program, module, x))
    sharding = plan_sharding(program, 2)
    heads = {
        sharding.rules[choice].outputs
        for node, choice in zip(changed.nodes, sharding.choices, strict=True)
        if node.kind is NodeKind.OPERATOR and node.target is aten.matmul.default and choice >= 0
    }
    assert heads == {("S1",)}


def test_products_with_weights_are_split_along_samples_and_tokens():
    """Three products, each with its own dims, and the result is the same to the last bit."""
    module, x = Weighted(), torch.randn(3, 8, 6)
    program = record_module(module, x, granularity="operators")
    changed = unflatten_batched_products(program)
    assert targets(changed).count(aten.linear.default) == 3
    assert not {aten.mm.default, aten.addmm.default} & set(targets(changed))
    assert torch.equal(run(changed, module, x), run(program, module, x))
    finder = RuleFinder(2)
    nodes = [changed.nodes[index] for index in live_nodes(changed)]
    found = [signature_of(changed, node) for node in nodes if node.target is aten.linear.default]
    tokens = [{str(rule).partition(",")[0] for rule in finder.rules(signature)} for signature in found]
    assert all("S1" in inputs and "S2" in inputs for inputs in tokens)


def test_a_product_of_what_is_written_later_stays():
    """Reading it where the result is viewed would read other values."""
    left, right = torch.randn(2, 2, 2, 3), torch.randn(2, 2, 3, 5)
    program = record_module(Written(), (left, right), granularity="operators")
    changed = unflatten_batched_products(program)
    assert aten.bmm.default in targets(changed)
    assert torch.equal(run(changed, Written(), left, right), left @ right)
