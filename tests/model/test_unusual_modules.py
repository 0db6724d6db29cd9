"""Habits of real modules that a recording could lose: exact at every legal cut, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from outsize.errors import RecordingError
from outsize.model.cuts import cut_points
from outsize.model.record import record_module
from sliced_run import run_sliced, run_whole, worst_relative_error

TOLERANCE = 1e-12


class Clipped(torch.autograd.Function):
    """The identity, with a backward that no operator has."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 0.5 * gradient.clamp(-1e-2, 1e-2)


kept_apply = Clipped.apply  # as many modules do at import time


@dataclass
class Outputs:
    """Not registered with pytree."""

    loss: torch.Tensor
    hidden: torch.Tensor


class Habit(nn.Module):
    """Three blocks, with something unusual between the first and the second."""

    def __init__(
        self, habit: Callable[[Habit, torch.Tensor], torch.Tensor], finish: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.habit, self.finish = habit, finish

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.habit(self, self.blocks[0](x).tanh())
        for block in self.blocks[1:]:
            hidden = hidden + block(hidden).tanh()
        return self.finish(hidden)


def with_other_parameters(model: Habit, hidden: torch.Tensor) -> torch.Tensor:
    block = model.blocks[1]
    doubled = {name: 2 * parameter for name, parameter in block.named_parameters()}
    return torch.func.functional_call(block, doubled, (hidden,))


def with_residuals_in_place(model: Habit, hidden: torch.Tensor) -> torch.Tensor:
    mixed = model.blocks[1](hidden)
    mixed += hidden
    return mixed.mul_(0.5)


def clipped_straight_through(model: Habit, hidden: torch.Tensor) -> torch.Tensor:
    mixed = model.blocks[1](hidden)
    with torch.no_grad():
        mixed.clamp_(-0.1, 0.1)
    return mixed


def mean_square(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.square().mean()


HABITS: dict[str, tuple[Any, Any]] = {
    "an apply that was kept": (lambda _model, hidden: kept_apply(hidden), mean_square),
    "functional_call": (with_other_parameters, mean_square),
    "a write without gradient": (clipped_straight_through, mean_square),
    "residuals in place": (with_residuals_in_place, mean_square),
    "a plain dataclass": (lambda _model, hidden: hidden, lambda h: Outputs(mean_square(h), h)),
    "a column beside the loss": (
        lambda _model, hidden: hidden,
        lambda h: {"score": h[:, :1], "value": mean_square(h)},
    ),
}


@pytest.mark.parametrize("name", HABITS)
def test_gradients_are_the_whole_modules_at_every_cut(name: str) -> None:
    """Loss and gradients of two stages, wherever the module is cut."""
    torch.manual_seed(0)
    module = Habit(*HABITS[name]).double()
    batch = torch.randn(4, 6, dtype=torch.float64)
    program = record_module(module, batch)
    loss, expected = run_whole(module, batch)
    cuts = cut_points(program)
    assert cuts
    for cut in cuts:
        found_loss, found, _ = run_sliced(program, [cut.node_index], module, batch)
        assert found_loss == pytest.approx(loss, rel=TOLERANCE)
        assert worst_relative_error(found, expected) < TOLERANCE


class Renormed(nn.Module):
    """Writes into its parameters before it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.second.weight.div_(2)
        return mean_square(self.second(self.first(x)))


def test_writes_into_parameters_are_refused() -> None:
    """Between blocks nothing would write them again; silence would train another model."""
    with pytest.raises(RecordingError, match="parameter"):
        record_module(Renormed(), torch.randn(4, 6))


class Checked(nn.Module):
    """Takes a decision from what many alike blocks made, the last of which are not run when recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return mean_square(x) if (x > 1e6).any() else x.mean()


def test_decisions_taken_from_repeated_blocks_are_refused() -> None:
    """Their results have shapes only; what happens to lie in their memory decides nothing."""
    with pytest.raises(RecordingError, match="depends on parameters"):
        record_module(Checked(), torch.randn(4, 6))


def relative_entropy(hidden: torch.Tensor) -> torch.Tensor:
    """Torch looks whether every scale is positive, and whether there are samples outside of the support."""
    latent = torch.distributions.Normal(hidden[:, :3], hidden[:, 3:].exp())
    prior = torch.distributions.Normal(torch.zeros(4, 3).to(hidden), torch.ones(4, 3).to(hidden))
    return torch.distributions.kl_divergence(latent, prior).mean()


def nll_of_variances(hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.gaussian_nll_loss(hidden[:, :3], hidden[:, 3:], hidden[:, 3:].exp())


def not_negative(hidden: torch.Tensor) -> torch.Tensor:
    square = hidden.square()
    assert (square >= 0).all(), "squares are not negative"
    if not torch.isfinite(square).all():
        raise ValueError("not finite")
    return square.mean()


def chosen_by_value(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mean() if (hidden > 0).any() else hidden.square().mean()


@pytest.mark.parametrize("finish", [relative_entropy, not_negative, nll_of_variances])
def test_checks_that_only_raise_are_taken_to_hold(finish: Callable[..., Any]) -> None:
    """They decide nothing else; distributions and losses of torch check so."""
    program = record_module(Habit(lambda _model, hidden: hidden, finish), torch.randn(4, 6))
    assert program.guards == ()
    assert program.rung == "fake_tensors"


def test_values_that_choose_what_is_computed_are_refused() -> None:
    """Training changes them."""
    with pytest.raises(RecordingError, match="takes a number"):
        record_module(Habit(lambda _model, hidden: hidden, chosen_by_value), torch.randn(4, 6))
