"""Random numbers that are no tensors are refused, in and between blocks; a recording draws none."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from model.tiny_models import build
from outsize.errors import RecordingError
from outsize.model.deferred import build_deferred
from outsize.model.record import record_module
from outsize.model.recording import record

X = torch.ones(2, 4, dtype=torch.float64)


class Scaled(nn.Module):
    """A block that multiplies by what it draws."""

    draw: Callable[[], float] = staticmethod(lambda: 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.draw()


class ScaledByPython(Scaled):
    draw = staticmethod(random.random)


class ScaledByNumpy(Scaled):
    draw = staticmethod(lambda: float(numpy.random.rand()))


class LayerDrop(nn.Module):
    """Stochastic depth as it is mostly written by hand."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return self.blocks[0](x).square().mean()


class Chain(LayerDrop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("factory", "source"),
    [
        (lambda: LayerDrop(Scaled), "Python's random"),
        (lambda: Chain(ScaledByPython), "Python's random"),
        (lambda: Chain(ScaledByNumpy), "numpy.random"),
    ],
)
def test_numbers_from_python_and_numpy_are_refused(factory: Callable[[], nn.Module], source: str) -> None:
    """A module, a factory and what ``parallelize`` records: one check, whatever the numbers happen to be."""
    for attempt in (
        lambda: record_module(build(factory), X),
        lambda: record_module(build_deferred(lambda: build(factory)).module, X),
        lambda: record(lambda: build(factory), X),
    ):
        states = random.getstate(), numpy.random.get_state()
        with pytest.raises(RecordingError, match=f"draws random numbers from {source}"):
            attempt()
        assert random.getstate() == states[0]
        assert (numpy.random.get_state()[1] == states[1][1]).all()  # type: ignore[index]


def test_random_numbers_that_are_tensors_are_recorded() -> None:
    """What the message advises works."""

    class Noisy(Scaled):
        draw = staticmethod(lambda: torch.rand(()))  # type: ignore[assignment]

    program = record_module(build(lambda: Chain(Noisy)), X)
    assert [node.is_random for node in program.nodes if node.target == "blocks.1"] == [True]
