"""All strategies, in the order in which they are judged."""

from __future__ import annotations

from outsize.strategies.base import Strategy
from outsize.strategies.combined import Combined
from outsize.strategies.fully_sharded import FullySharded
from outsize.strategies.mirrored import Mirrored
from outsize.strategies.multi_worker_mirrored import MultiWorkerMirrored
from outsize.strategies.parameter_server import ParameterServer
from outsize.strategies.pipeline_parallel import PipelineParallel
from outsize.strategies.tensor_parallel import TensorParallel

__all__ = ["ALL_STRATEGIES"]

ALL_STRATEGIES: tuple[Strategy, ...] = (
    Mirrored(),
    MultiWorkerMirrored(),
    ParameterServer(),
    FullySharded(),
    PipelineParallel(),
    TensorParallel(),
    Combined(),
)
