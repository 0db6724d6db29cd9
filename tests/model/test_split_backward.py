"""A backward in two parts leaves the gradients of one, and keeps only what weight gradients need."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812 - as torch's users know it
from torch.utils.checkpoint import checkpoint

from outsize.model.cost_meter import CostMeter
from outsize.model.split_backward import (
    full_backward,
    input_gradients,
    products_put_off,
    unpack_unchanged,
)

DOUBLE = {"dtype": torch.float64}


class Tied(nn.Module):
    """One matrix is an embedding's table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, **DOUBLE)
        self.inner = nn.Linear(4, 4, **DOUBLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.table(torch.arange(3)) + x[:3, :4]
        return F.linear(self.inner(embedded), self.table.weight)


class Twice(nn.Module):
    """One layer is used twice, the second time on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, **DOUBLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh())


class AlsoElementwise(nn.Module):
    """A weight is multiplied by and also penalised."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False, **DOUBLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer.weight.square().sum()


class Recomputed(nn.Module):
    """A block in the middle runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, **DOUBLE), nn.Linear(4, 4, **DOUBLE)
        self.block = nn.Sequential(nn.Linear(4, 4, **DOUBLE), nn.Tanh(), nn.Linear(4, 4, **DOUBLE))
        self.num_calls = 0
        self.block.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.num_calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


def make_conv() -> nn.Module:
    """Strided, grouped and transposed convolutions with biases and a norm."""
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1, **DOUBLE),
        nn.GroupNorm(2, 6, **DOUBLE),
        nn.Conv2d(6, 4, 3, stride=2, groups=2, **DOUBLE),
        nn.ConvTranspose2d(4, 2, 2, **DOUBLE),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 5, **DOUBLE), (3, 4)),
    "three_dims": (lambda: nn.Sequential(nn.Linear(4, 5, **DOUBLE), nn.LayerNorm(5, **DOUBLE)), (2, 3, 4)),
    "frozen": (lambda: nn.Sequential(_frozen(nn.Linear(4, 4, **DOUBLE)), nn.Linear(4, 4, **DOUBLE)), (3, 4)),
    "lstm": (lambda: _First(nn.LSTM(4, 5, **DOUBLE)), (3, 2, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, **DOUBLE), (3, 2, 4)),
    "convolutions": (make_conv, (2, 4, 7, 7)),
    "tied": (Tied, (3, 4)),
    "twice": (Twice, (3, 4)),
    "also_elementwise": (AlsoElementwise, (3, 4)),
    "recomputed": (Recomputed, (3, 4)),
}


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def gradients_of(
    model: nn.Module, x: torch.Tensor, backward: Callable[[list[torch.Tensor], list[torch.Tensor]], None]
) -> list[torch.Tensor | None]:
    """Return gradients of the input and all parameters after two micro-batches."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    for factor in (1.0, 0.5):
        output = model(x)
        generator = torch.Generator().manual_seed(1)
        backward([output], [factor * torch.randn(output.shape, generator=generator, **DOUBLE)])
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def run_in_two_parts(outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    input_gradients(outputs, gradients).add()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("needs_input_gradient", [True, False])
@pytest.mark.parametrize("backward", [run_in_two_parts, full_backward])
def test_gradients_are_those_of_autograd(name: str, needs_input_gradient: bool, backward: Callable) -> None:
    """Every gradient of linear, convolutional, recurrent, tied, shared, frozen and recomputed parts."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape, **DOUBLE).requires_grad_(needs_input_gradient)
    expected = gradients_of(model, x, torch.autograd.backward)
    expected = [None if gradient is None else gradient.clone() for gradient in expected]
    for found, gradient in zip(gradients_of(model, x, backward), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-13)


def test_weights_wait_for_the_second_part() -> None:
    """After the first part the input and the biases have gradients, the weights none."""
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), torch.randn(3, 4, requires_grad=True)
    later = input_gradients([model(x)], [torch.ones(3, 4)])
    assert x.grad is not None
    assert all(layer.bias.grad is not None and layer.weight.grad is None for layer in model)
    later.add()
    assert all(layer.weight.grad is not None for layer in model)


def test_what_only_input_gradients_need_is_freed_by_them() -> None:
    """B172: tanh's output feeds a layer and is kept for it; the sigmoid's inside is not kept any longer."""
    layers = [nn.Linear(4, 4) for _ in range(2)]
    x = torch.randn(3, 4, requires_grad=True)
    kept = layers[0](x).tanh()
    dropped = layers[1](kept).sigmoid()
    output = dropped * 2
    storages = [_watch(kept), _watch(dropped)]
    del kept, dropped
    later = input_gradients([output], [torch.ones(3, 4)])
    del output
    assert [storage() is None for storage in storages] == [False, True]
    later.add()
    assert storages[0]() is None


@pytest.mark.parametrize("name", ["attention", "convolutions", "twice", "recomputed"])
def test_what_is_kept_between_the_parts_is_known_beforehand(name: str) -> None:
    """Inputs and output gradients of what is put off are all that is alive after the input gradients."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape, **DOUBLE)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack_unchanged):
        products = products_put_off([model(x.clone().requires_grad_())])
    storages = {each.received.untyped_storage() for each in products}
    expected = sum(storage.nbytes() for storage in storages) + sum(each.gradient_bytes for each in products)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with CostMeter() as meter:
        received = x.clone().requires_grad_()
        output = model(received)
        edge, gradient = [get_gradient_edge(output)], [torch.ones_like(output)]
        del output
        later = input_gradients(edge, gradient)
        del edge, gradient, received
        assert meter.live_bytes == expected
        later.add()
        assert meter.live_bytes == 0


def _watch(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


def test_recomputed_blocks_run_once_more_in_all() -> None:
    """A block runs in forward and once in backward; torch's split backward runs it again for each weight."""
    model = Recomputed()
    output = model(torch.randn(3, 4, **DOUBLE).requires_grad_())
    input_gradients([output], [torch.ones_like(output)]).add()
    assert model.num_calls == 2


def test_parameters_with_hooks_are_left_to_autograd() -> None:
    """A hook sees the gradient as always."""
    layer, seen = nn.Linear(4, 4), []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    full_backward([layer(torch.randn(3, 4, requires_grad=True))], [torch.ones(3, 4)])
    assert torch.equal(seen[0], layer.weight.grad)


def test_what_is_passed_on_gets_its_gradient() -> None:
    """A skip connection over a stage: an output is an input itself; of the other its edge is kept."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    skipped = torch.randn(3, 4, requires_grad=True)
    edge = get_gradient_edge(layer(x))
    full_backward([skipped, edge], [torch.full((3, 4), 2.0), torch.ones(3, 4)])
    assert torch.equal(skipped.grad, torch.full((3, 4), 2.0))
    torch.testing.assert_close(x.grad, torch.ones(3, 4) @ layer.weight.detach())
