"""Speed of outsize's pipelines on two processes of one thread, against its own bound and against peers.

    python benchmarks/pipeline.py [--seconds 200] [--schedules 1f1b gpipe zb_h1] [--microbatches 8 16]

Eight Llama-like blocks of 20 to 30 ms a micro-batch, four on each process, over gloo. Contenders take turns
within one run, in changing order, and every ratio is the median over rounds of ratios of neighbours, whose
machine is the same. Above 1 outsize is faster. The last line is JSON:

- `of_bound`: the step that the simulator predicts from action times measured without a pipeline, in the same
  two processes at the same time, over the step that outsize takes;
- `of_bound_within_step`: the same with the times that the actions took within that very step: what is lost to
  transfers and between actions, whatever the machine does meanwhile;
- `against_by_hand`: torch.distributed.pipelining with hand-made stages on the same schedule;
- `against_placed_layers`: all samples pass at once, one process works at a time;
- `against_deepspeed`: its PipelineModule, optimizer included on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.plan.schedules import make_schedule
from outsize.runtime.parallel_model import ParallelModel
from outsize.runtime.parallelize import parallelize
from pipeline_actions import bound_of_step_s, measure_bound_s, recording_actions
from pipeline_model import Model, block_names, make_batch
from pipeline_peers import by_deepspeed, by_hand

NUM_RANKS = 2
Ratios = dict[str, list[float]]


class Contest:
    """outsize and its peers on one schedule and number of micro-batches, on this rank."""

    def __init__(self, name: str, num_microbatches: int) -> None:
        self.name, self.num_microbatches = name, num_microbatches
        self.batch = make_batch(num_microbatches)
        self.schedule = make_schedule(name, num_ranks=NUM_RANKS, num_microbatches=num_microbatches)
        self.model = self._parallel_model()
        self.by_hand, hand_made = by_hand(name, num_microbatches, self.model.parameters, self.batch)
        self.stage = _own_stage({name: entry[:1] for name, entry in self.batch.items()})
        self._check_gradients(hand_made)

    def _parallel_model(self) -> ParallelModel:
        labels = ["", *block_names(NUM_RANKS)[1:]]
        plan = Plan(
            "pipeline_parallel",
            Mesh(pp=NUM_RANKS),
            tuple(StageSpec(index, label) for index, label in enumerate(labels)),
            ScheduleSpec(self.name, self.num_microbatches),
            self.num_microbatches,
        )
        return parallelize(Model, plan, sample_batch=self.batch)

    def _check_gradients(self, hand_made: torch.nn.Module) -> None:
        """Both compute the same, or their times mean nothing."""
        self.outsize()
        self.by_hand()
        for mine, theirs in zip(self.model.parameters.values(), hand_made.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)

    def outsize(self) -> None:
        """Compute the gradients of one global batch, their norm, and the loss on every rank."""
        self.model.compute_gradients(self.batch)

    def run_round(self, ratios: Ratios, *, is_reversed: bool) -> None:
        """Time each contender once."""
        runs: list[tuple[str, Callable[[], float]]] = [
            ("bound", self._bound_s),
            ("outsize", lambda: timed(self.outsize)),
            ("by_hand", lambda: timed(self.by_hand)),
        ]
        found = {name: run() for name, run in (runs[::-1] if is_reversed else runs)}
        within, whole = self._bound_within_step_s()
        key = f"{self.name}_{self.num_microbatches}"
        ratios[f"of_bound/{key}"].append(found["bound"] / found["outsize"])
        ratios[f"of_bound_within_step/{key}"].append(within / whole)
        ratios[f"against_by_hand/{key}"].append(found["by_hand"] / found["outsize"])

    def _bound_s(self) -> float:
        microbatch = {name: entry[:1] for name, entry in self.batch.items()}
        return measure_bound_s(self.schedule, self.stage, microbatch)

    def _bound_within_step_s(self) -> tuple[float, float]:
        executor = next(iter(self.model.executions._executors.values()))
        with recording_actions(executor._runtime._stages) as own:  # type: ignore[attr-defined]
            step_s = timed(self.outsize)
        logs: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(logs, own)
        return bound_of_step_s(self.schedule, {key: at for log in logs for key, at in log.items()}), step_s


def _own_stage(microbatch: dict[str, torch.Tensor]) -> StageModule:
    """Return this rank's stage outside any pipeline, with parameters of its own."""
    program = record_module(module := Model(), microbatch)
    (cut,) = (point for point in program.cut_points() if point.label == block_names(NUM_RANKS)[1])
    return StageModule(program, slice_program(program, [cut.node_index])[dist.get_rank()], module)


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds from the first rank's start to the last one's end."""
    dist.barrier()
    start = time.perf_counter()
    run()
    ends = torch.tensor([start, -time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)  # ranks share one clock
    return -float(ends[1] + ends[0])


class OtherPeers:
    """What has no schedule to choose: layers merely placed, DeepSpeed."""

    def __init__(self, contest: Contest) -> None:
        self.contest = contest
        self.missing: dict[str, str] = {}
        parameters, batch = contest.model.parameters, contest.batch
        self.placed, _ = by_hand("gpipe", 1, parameters, batch)
        try:
            self.deepspeed = by_deepspeed(contest.num_microbatches, batch)
        except Exception as error:  # whatever it is, it is the reason to report
            self.missing["deepspeed"] = f"{type(error).__name__}: {error}"

    def run_round(self, ratios: Ratios) -> None:
        """Time each peer once, beside outsize with 1F1B."""
        key = f"{self.contest.name}_{self.contest.num_microbatches}"
        outsize_s, placed_s = timed(self.contest.outsize), timed(self.placed)
        ratios[f"against_placed_layers/{key}"].append(placed_s / outsize_s)
        if "deepspeed" not in self.missing:
            outsize_s = timed(lambda: self.contest.model.train_step(self.contest.batch))
            ratios[f"against_deepspeed/{key}"].append(timed(self.deepspeed) / outsize_s)


def measure(rank: int, store: str, given: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    contests = [Contest(name, count) for name in given.schedules for count in given.microbatches]
    others = [OtherPeers(contest) for contest in contests if contest.name == "1f1b"]
    ratios: Ratios = defaultdict(list)
    started, round_number = time.monotonic(), 0
    while _all_have_time(given.seconds - (time.monotonic() - started)):
        for contest in contests:
            contest.run_round(ratios, is_reversed=bool(round_number % 2))
        for other in others if round_number % 3 == 0 else ():
            other.run_round(ratios)
        round_number += 1
    if rank == 0:
        queue.put((dict(ratios), others[0].missing if others else {}))
    dist.destroy_process_group()


def _all_have_time(left_s: float) -> bool:
    least = torch.tensor(left_s)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least > 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=200, help="begin no round after these")
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "gpipe", "zb_h1"])
    parser.add_argument("--microbatches", type=int, nargs="*", default=[8, 16])
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store", given, queue), nprocs=NUM_RANKS)
    ratios, missing = queue.get()
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for key, values in ratios.items():
        kind, _, name = key.partition("/")
        medians[kind][name] = round(statistics.median(values), 3)
        print(f"{kind:22} {name:9}", " ".join(f"{value:.3f}" for value in sorted(values)))
    print(json.dumps({**medians, "not_run": missing}))


if __name__ == "__main__":
    main()
