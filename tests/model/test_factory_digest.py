"""Factories that build another model each time are noticed, whatever it is that differs."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from coverage_families import FAMILIES
from outsize.errors import ModelError
from outsize.model.deferred import build_deferred
from outsize.model.factory_digest import digest_model, first_difference
from outsize.model.recording import record

X = torch.ones(2, 4)


class Scaled(nn.Module):
    """A layer and a number that is used beside it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).sum()


def drawn_by_python() -> nn.Module:
    module = nn.Linear(4, 4)
    nn.init.constant_(module.bias, random.random())
    return module


def drawn_by_numpy() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.tensor(np.random.default_rng().normal(size=(4, 4))))
    return module


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(random.random() / 2))


@pytest.mark.parametrize(
    ("factory", "difference"),
    [
        (drawn_by_python, "bias has other initial values the second time"),
        (drawn_by_numpy, "weight has other initial values the second time"),
        (with_dropout, "1 has other settings the second time"),
        (lambda: Scaled(random.random()), "the model has other settings the second time"),
        (lambda: nn.Linear(4, random.randint(1, 10**6)), r"bias is \(\(\d+,\)"),
    ],
)
def test_what_differs_is_named(factory: Callable[[], nn.Module], difference: str) -> None:
    """Values drawn by Python or NumPy, settings, sizes: the message names the place."""
    with pytest.raises(ModelError, match=difference) as caught:
        record(factory, (X,))
    assert "every process calls the factory" in str(caught.value)


def test_a_side_effect_of_the_factory_is_noticed() -> None:
    """A default dtype that the factory leaves behind makes the second model another one."""

    def factory() -> nn.Module:
        module = nn.Linear(4, 4)
        torch.set_default_dtype(torch.float64)
        return module

    try:
        with pytest.raises(ModelError, match=r"bias is .*float32.*then .*float64"):
            record(factory, (X,))
    finally:
        torch.set_default_dtype(torch.float32)


@dataclass
class Held:
    """A number that a forward reads from outside of its module."""

    value: float = 0.0


def test_a_number_that_changes_between_recordings_is_refused() -> None:
    """The forward multiplies by another number every time; two recordings do not agree."""
    held = Held()

    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held.value += 1
            return (self.linear(x) * held.value).sum()

    with pytest.raises(Exception, match="two recordings differ"):
        record(Moving, (X,))


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "t5", "resnet", "mamba", "lstm", "swin"])
def test_models_of_libraries_are_the_same_every_time(name: str) -> None:
    """Nothing differs between two builds, seeds apart: those belong to the run, not to the model."""
    family = FAMILIES[name]
    first, second = build_deferred(family.factory), build_deferred(family.factory, seed=5)
    assert first_difference(first, second) is None
    assert digest_model(first) == digest_model(second)
