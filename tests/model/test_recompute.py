"""Blocks that run again in backward: gradients, buffers and random numbers are as without."""

import copy

import pytest
import torch
from torch import nn

from model.tiny_models import build
from outsize.model.recompute import recomputed

X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8)


class Counted(nn.Module):
    """Multiplies by how often it was called: in place, or by another tensor every time."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return torch.tanh(self.linear(x) * self.calls.clone())


BLOCKS = {
    "batch_norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)),
    "counted_in_place": lambda: Counted(in_place=True),
    "counted_anew": lambda: Counted(in_place=False),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_buffers_are_written_once_and_read_as_in_forward(name: str) -> None:
    """Row B193: three micro-batches forward, then backward; counters, statistics, gradients as without."""
    plain = build(BLOCKS[name])
    block = copy.deepcopy(plain)
    for module, call in ((plain, plain), (block, recomputed(block))):
        torch.manual_seed(3)
        outputs = [call(X * factor) for factor in (1.0, 2.0, 3.0)]
        for output in reversed(outputs):
            output.square().mean().backward()
        assert module.training
    for name_, buffer in plain.named_buffers():
        assert torch.equal(block.get_buffer(name_), buffer)
    for name_, parameter in plain.named_parameters():
        assert torch.equal(block.get_parameter(name_).grad, parameter.grad)


def test_a_backward_in_two_halves_sees_the_same_buffers_twice() -> None:
    """Zero-bubble schedules ask for input gradients first and for weight gradients later."""
    block = build(BLOCKS["counted_in_place"])
    call, x = recomputed(block), X.clone().requires_grad_()
    loss = call(x).square().mean()
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    weight_gradient = torch.autograd.grad(loss, [block.linear.weight])[0]
    block.calls.zero_()
    again = block(x).square().mean()
    expected = torch.autograd.grad(again, [x, block.linear.weight])
    assert torch.equal(first, expected[0])
    assert torch.equal(weight_gradient, expected[1])
    assert block.calls.item() == 1


def test_an_input_without_gradient_does_not_stop_the_weights() -> None:
    """Row B187: integers in, gradients for the table they index."""
    table = build(lambda: nn.Embedding(5, 3))
    recomputed(table)(torch.tensor([1, 1, 4])).sum().backward()
    assert table.weight.grad.sum(1).tolist() == [0, 6, 0, 0, 3]
