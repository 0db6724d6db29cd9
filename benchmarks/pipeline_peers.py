"""The peers of the pipeline benchmark: the same stages by hand, layers merely placed, DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

from pipeline_model import NUM_BLOCKS, Block, mean_square, stage_by_hand

__all__ = ["by_deepspeed", "by_hand"]

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zb_h1": ScheduleInterleavedZeroBubble}


def by_hand(
    name: str, num_microbatches: int, parameters: Mapping[str, torch.Tensor], batch: dict[str, torch.Tensor]
) -> tuple[Callable[[], float], nn.Module]:
    """Return torch's schedule over hand-made stages with these parameters, and this rank's stage.

    The losses are scaled by hand, which spares torch a pass over all gradients.
    """
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    module = stage_by_hand(rank, num_stages, parameters)
    stage = PipelineStage(module, rank, num_stages, torch.device("cpu"))
    is_multi = name == "zb_h1"
    schedule = _SCHEDULES[name](
        [stage] if is_multi else stage,
        num_microbatches,
        loss_fn=lambda output, target: mean_square(output, target) / num_microbatches,
        scale_grads=False,
    )

    def step() -> float:
        module.zero_grad()
        if rank == 0:
            schedule.step(batch["x"], return_outputs=False)
            return 0.0
        losses: list[torch.Tensor] = []
        schedule.step(target=batch["target"], losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().sum())

    return step, module


def by_deepspeed(num_microbatches: int, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Return a training step of DeepSpeed's PipelineModule (1F1B) with AdamW.

    Raises:
        ImportError: it is not installed.
    """
    rank = dist.get_rank()
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), LOCAL_SIZE=str(dist.get_world_size()))
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    # An all-reduce through shared memory, which a pipeline does not use; it would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    module = PipelineModule(
        layers=[LayerSpec(Block) for _ in range(NUM_BLOCKS)],
        num_stages=dist.get_world_size(),
        loss_fn=mean_square,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_microbatches,
        "train_batch_size": num_microbatches,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(module.parameters())
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, model_parameters=list(module.parameters()), config=settings
    )
    samples = _repeat(batch, num_microbatches)
    return lambda: float(engine.train_batch(samples).detach())


def _repeat(batch: dict[str, torch.Tensor], num_microbatches: int) -> Iterator[Any]:
    while True:
        for at in range(num_microbatches):
            yield batch["x"][at : at + 1], batch["target"][at : at + 1]
