"""Modules with hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from model.tiny_models import llama
from outsize.errors import RecordingError
from outsize.model.batch_entries import flatten_batch
from outsize.model.deferred import apply_materialised, build_deferred
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule


def test_backward_hooks_are_refused_with_the_module_named() -> None:
    """Their module would let no gradient through, and no one would notice."""
    module, batch = llama()
    module.model.layers[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(RecordingError, match=r"module model\.layers\.1 has backward hooks"):
        record_module(module, batch)


def test_hooks_on_gradients_of_parameters_are_refused_and_attributes_kept() -> None:
    """A hook would see the gradient of one micro-batch; what an optimizer is told of a parameter stays."""

    def hooked() -> nn.Module:
        module = nn.Linear(4, 4)
        module.weight.register_hook(lambda gradient: gradient.tril())
        return module

    def told() -> nn.Module:
        module = nn.Linear(4, 4)
        module.bias.no_decay = True
        return module

    with pytest.raises(RecordingError, match="parameter weight has a hook on its gradient"):
        build_deferred(hooked)
    deferred = build_deferred(told)
    apply_materialised(deferred.module, deferred.materialise(["weight", "bias"]))
    assert deferred.module.bias.no_decay
    assert not deferred.module.bias.is_meta


def test_forward_hooks_act_once() -> None:
    """On a block or inside it: what they change is changed once, in the loss and in every gradient."""
    module, batch = llama()
    module.model.layers[0].mlp.register_forward_hook(lambda _module, _args, output: 2 * output)
    module.model.layers[1].register_forward_hook(lambda _module, _args, output: 3 * output)
    module.model.layers[1].register_forward_pre_hook(lambda _module, args: (0.5 * args[0], *args[1:]))
    loss = module(**batch).loss
    loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    program = record_module(module, batch)
    stage = StageModule(program, slice_program(program, [])[0], module)
    found = stage(**flatten_batch(batch)[0]).loss
    assert torch.equal(found, loss)
    found.backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-14)


class ChangedBetween(nn.Module):
    """Changes a tensor between two blocks by something that is no operator."""

    def __init__(self, change: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.change(hidden)
        return self.second(hidden).square().mean()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda h: h.register_hook(lambda gradient: 2 * gradient), "registers a hook on a tensor's gradient"),
        (lambda h: h.detach_(), "detaches a tensor in place"),
        (lambda h: setattr(h, "data", h.data.clamp(-1, 1)), "gives a tensor other data"),
    ],
    ids=["hook", "detach", "data"],
)
def test_changes_between_blocks_that_are_no_operators_are_refused_with_their_line(
    change: Callable[[torch.Tensor], object], what: str
) -> None:
    """They would be left out of the recording."""
    with pytest.raises(RecordingError, match=rf"{what} at .*test_hooks\.py:\d+"):
        record_module(ChangedBetween(change), torch.randn(2, 4))
    hidden = torch.ones(2)
    hidden.data = torch.zeros(2)  # torch is as it was
    assert hidden.tolist() == [0, 0]


def test_scripted_modules_are_refused_with_advice() -> None:
    """Their operators cannot be seen."""
    module = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(RecordingError, match="module 1 is compiled to TorchScript"):
        record_module(module, torch.randn(2, 4))
