"""Speed of a transformer block split by outsize against the same block split by hand, on two processes.

    python benchmarks/operator_parallel.py [--widths 256 512 1024 2048] [--rounds 15]

Both run forward and backward of the same weights on the same batch, in turn, in the same two one-thread
processes over gloo. The hand-written block is Megatron's: columns then rows, one all-reduce after each of
attention and MLP in forward, one before each in backward, with raw collectives. Ends with one JSON line;
a ratio above 1 says that outsize is faster. (No file here may be called operator.py: it would stand in for
the standard library's module of that name.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's users know it

from outsize.model.operator_rules.shards import shard_of
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule
from outsize.plan.sharding import Sharding
from outsize.planner.sharding import plan_module_sharding
from outsize.planner.sharding_costs import GLOO_SCATTER_PASSES, ShardingCosts
from outsize.runtime.collectives import set_axis_group
from outsize.runtime.tensor_parallel import lower, parameter_placements

DEGREE = 2
HEAD_WIDTH = 64


class Block(nn.Module):
    """A pre-norm transformer block with a mean square as its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x.square().mean()

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], -1, HEAD_WIDTH)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class BlockByHand(Block):
    """The same block on this rank's columns and rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _Leave.apply(self.attend(_Enter.apply(self.norm_1(x))))
        x = x + _Leave.apply(self.down(F.gelu(self.up(_Enter.apply(self.norm_2(x))))))
        return x.square().mean()


def split_by_hand(block: Block, width: int, rank: int) -> nn.Module:
    """Return the hand-written block holding this rank's part of the weights of ``block``."""
    mine = BlockByHand(width)
    for (name, target), source in zip(mine.named_parameters(), block.parameters(), strict=True):
        dim = {"out.weight": 1, "down.weight": 1}.get(name, None if "norm" in name else 0)
        whole = source.detach()
        target.data = (whole if dim is None else whole.chunk(DEGREE, dim)[rank]).clone()
    return mine


def split_by_outsize(block: Block, sharding: Sharding, x: torch.Tensor, rank: int) -> nn.Module:
    """Return the lowered program holding this rank's part of the weights of ``block``."""
    program = lower(record_module(block, x, granularity="operators"), sharding)
    placements = parameter_placements(sharding)
    for name, parameter in block.named_parameters():
        if name in placements:
            parameter.data = shard_of(parameter.data, placements[name], DEGREE, rank).clone()
    return StageModule(program, slice_program(program, [])[0], block)


def measure(
    rank: int, store: str, sizes: list[int], rounds: int, shardings: list[Sharding], queue: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=DEGREE)
    set_axis_group("tp", dist.group.WORLD, seed=0)
    found = {}
    for width, sharding in zip(sizes, shardings, strict=True):
        torch.manual_seed(0)
        block, x = Block(width), torch.randn(*batch_shape(width))
        by_hand = split_by_hand(block, width, rank)
        stage = split_by_outsize(block, sharding, x, rank)
        (entry,) = stage.part.batch_entries
        found[width] = compare(lambda m=by_hand, x=x: m(x), lambda m=stage, e=entry, x=x: m(**{e: x}), rounds)
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def compare(by_hand: Callable[[], Any], by_outsize: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return median seconds of both, run in turn, and how far their losses are apart."""
    times: dict[str, list[float]] = {"by_hand_s": [], "outsize_s": []}
    losses = {}
    for round_number in range(rounds + 2):
        for name, run in (("by_hand_s", by_hand), ("outsize_s", by_outsize)):
            dist.barrier()
            start = time.perf_counter()
            loss = run()
            loss.backward()
            if round_number >= 2:
                times[name].append(time.perf_counter() - start)
            losses[name] = loss.item()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians | {"loss_difference": abs(losses["by_hand_s"] - losses["outsize_s"])}


def batch_shape(width: int) -> tuple[int, int, int]:
    return (1, 256, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    costs = ShardingCosts(
        DEGREE,
        flops_per_s=3e10,
        memory_bytes_per_s=5e9,
        link_bytes_per_s=2e9,
        link_latency_s=1e-4,
        scatter_passes=GLOO_SCATTER_PASSES,
    )
    shardings = [
        plan_module_sharding(Block(width), torch.zeros(batch_shape(width)), DEGREE, costs=costs)
        for width in given.widths
    ]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store", given.widths, given.rounds, shardings, queue), nprocs=DEGREE)
    found = queue.get()
    for width, row in found.items():
        print(width, {name: round(value, 6) for name, value in row.items()})
    ratios = {f"width_{width}": round(row["by_hand_s"] / row["outsize_s"], 3) for width, row in found.items()}
    print(json.dumps({"ratios": ratios, "against": "hand-written columns and rows, raw collectives"}))


if __name__ == "__main__":
    main()
