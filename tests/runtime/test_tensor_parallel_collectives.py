"""The search finds the known splits without a hint: the collectives of one rank, counted while it runs."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F  # noqa: N812 - as torch's users know it
from torch.testing._internal.distributed.fake_pg import FakeStore

from outsize.model.operator_rules.shards import shard_of
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule
from outsize.plan.sharding import Sharding
from outsize.planner.sharding import plan_sharding
from outsize.planner.sharding_costs import ShardingCosts
from outsize.runtime.collectives import set_axis_group
from outsize.runtime.tensor_parallel import lower, parameter_placements

WIDTH, TOKENS = 256, 63  # an odd number of tokens is not split
SLOW_DEVICES = ShardingCosts(
    2, flops_per_s=1e11
)  # on which small modules take as long as large ones elsewhere


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Two ranks of which there is one: messages are counted, and sent nowhere."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    set_axis_group("tp", dist.group.WORLD, seed=0)
    yield
    dist.destroy_process_group()


class Residual(nn.Module):
    """A norm, the part under test, a residual: gradients flow into what comes before the part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.part(self.norm(x))).square().mean()


class Mlp(nn.Module):
    def __init__(self, *, is_gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if is_gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(middle)


class Attention(nn.Module):
    """Eight heads; key-value heads as given, in one projection with the queries where they are as many."""

    def __init__(self, num_key_heads: int, *, is_fused: bool = False) -> None:
        super().__init__()
        self.widths = [WIDTH, num_key_heads * 32, num_key_heads * 32]
        self.fused = nn.Linear(WIDTH, sum(self.widths)) if is_fused else None
        self.separate = None if is_fused else nn.ModuleList(nn.Linear(WIDTH, width) for width in self.widths)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.fused(x).split(self.widths, -1) if self.fused else [part(x) for part in self.separate]
        q, k, v = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Four experts, each on all tokens, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(-1).t().unsqueeze(-1)
        made = torch.bmm(F.gelu(torch.bmm(tokens.expand(4, -1, -1), self.up)), self.down)
        return (made * weights).sum(0).view_as(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 128, 3, padding=1), nn.Conv2d(128, 64, 3, padding=1)
        self.norm, self.norm_before = nn.BatchNorm2d(128), nn.GroupNorm(1, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.second(F.relu(self.norm(self.first(self.norm_before(x)))))
        return (x + made).square().mean()


def plan_and_count(
    module: nn.Module, *batch: torch.Tensor, costs: ShardingCosts | None = None
) -> tuple[Sharding, Counter[str], Counter[str]]:
    """Return the split found, and the collectives of a forward and of a backward on the first rank.

    Single numbers, such as a loss, are not counted.
    """
    program = record_module(module, batch, granularity="operators")
    sharding = plan_sharding(program, 2, costs=costs or SLOW_DEVICES)
    placements = parameter_placements(sharding)
    for name, parameter in module.named_parameters():
        if name in placements:
            parameter.data = shard_of(parameter.data, placements[name], 2, 0).clone()
    lowered = lower(program, sharding)
    stage = StageModule(lowered, slice_program(lowered, [])[0], module)
    numbers = sum(
        1
        for node in lowered.nodes
        if str(node.target).startswith("tp[P -> R]") and not lowered.specs[node.outputs[0]].shape
    )
    with CommDebugMode() as forward:
        loss = stage(**dict(zip(stage.part.batch_entries, batch, strict=True)))
    with CommDebugMode() as backward:
        loss.backward()
    found = [
        Counter({str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()})
        for mode in (forward, backward)
    ]
    found[0]["allreduce_"] -= numbers
    return sharding, +found[0], +found[1]


def hidden() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH)


@pytest.mark.parametrize("is_gated", [False, True])
def test_an_mlp_is_split_by_columns_then_rows(is_gated):
    """One sum in forward, after the rows; one in backward, before the columns."""
    sharding, forward, backward = plan_and_count(Residual(Mlp(is_gated=is_gated)), hidden())
    assert sharding.parameters["part.up.weight"] == "S0"
    assert sharding.parameters["part.down.weight"] == "S1"
    assert forward == backward == {"allreduce_": 1}


@pytest.mark.parametrize(
    ("attention", "queries"),
    [
        (lambda: Attention(8, is_fused=True), {"part.fused.weight": "S0[256,256,256]"}),
        (lambda: Attention(2, is_fused=True), {"part.fused.weight": "S0[256,64,64]"}),
        (lambda: Attention(8), {f"part.separate.{index}.weight": "S0" for index in range(3)}),
        (lambda: Attention(2), {f"part.separate.{index}.weight": "S0" for index in range(3)}),
    ],
)
def test_attention_is_split_by_heads(attention, queries):
    """Whole heads on each rank, in a fused projection too; one sum forward, one backward."""
    sharding, forward, backward = plan_and_count(Residual(attention()), hidden())
    assert queries.items() <= sharding.parameters.items()
    assert sharding.parameters["part.out.weight"] == "S1"
    assert forward == backward == {"allreduce_": 1}


def test_one_key_value_head_is_read_by_the_query_heads_of_every_rank():
    """Queries are split by heads, keys and values are gathered for all: one sum in forward besides."""
    sharding, forward, backward = plan_and_count(Residual(Attention(1)), hidden())
    assert sharding.parameters["part.separate.0.weight"] == "S0"
    assert sharding.parameters["part.out.weight"] == "S1"
    assert forward == {"_allgather_base_": 2, "allreduce_": 1}
    assert backward == {"_reduce_scatter_base_": 2, "allreduce_": 1}


def test_experts_lie_on_different_ranks():
    """Each rank runs two of four experts on all tokens; what they make is brought together once."""
    sharding, forward, backward = plan_and_count(Residual(Experts()), hidden())
    assert sharding.parameters["part.up"] == sharding.parameters["part.down"] == "S0"
    assert forward.total() == backward.total() == 1


def test_convolutions_are_split_by_channels_made_then_channels_read():
    """Batch norm between them normalises a rank's own channels; its running statistics are shared."""
    sharding, forward, backward = plan_and_count(Convolutions(), torch.randn(3, 64, 9, 9))
    assert sharding.parameters["first.weight"] == "S0"
    assert sharding.parameters["second.weight"] == "S1"
    assert forward == {"allreduce_": 3}  # one of them moves activations, two the running statistics
    assert backward == {"allreduce_": 1}
