"""Losses of three unequal micro-batches add up to that of the whole batch, for each form of loss."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from model.tiny_models import build
from outsize.model.loss_elements import count_loss_elements, loss_scales
from outsize.model.loss_shares import share_loss
from outsize.model.program import Program
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule

Loss = Callable[[SimpleNamespace, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

ROWS = (slice(0, 3), slice(3, 5), slice(5, 6))
X = torch.linspace(-2, 3, 6 * 4 * 8, dtype=torch.float64).view(6, 4, 8).sin()
TARGET = torch.linspace(0, 1, 6 * 4 * 5, dtype=torch.float64).view(6, 4, 5)
LABELS = torch.tensor(
    [[0, 1, 2, 3], [4, -100, -100, 0], [-100] * 4, [1, 2, -100, 3], [-100, 4, 0, 1], [2, 2, 2, -100]]
)
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.2], dtype=torch.float64)
OF_SAMPLES = frozenset({"x", "target", "labels", "weights"})
PRIOR = torch.linspace(0, 1, 8, dtype=torch.float64)  # shared by all samples
BATCH = {"x": X, "target": TARGET, "labels": LABELS, "weights": WEIGHTS, "prior": PRIOR}


class Losing(nn.Module):
    """A layer whose output a test makes a loss of."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.noise = nn.Parameter(torch.full((), 0.5))
        self.loss = loss

    def forward(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        prior: torch.Tensor,
    ) -> torch.Tensor:
        known = SimpleNamespace(linear=self.linear, noise=self.noise, weights=weights, prior=prior)
        return self.loss(known, self.linear(x), target, labels)


def summed_over_micro_batches(module: nn.Module) -> tuple[float, list[torch.Tensor], list[Program]]:
    """Return loss and gradients of the micro-batches, each scaled by its share, added up."""
    parts = [BATCH | {name: BATCH[name][rows] for name in OF_SAMPLES} for rows in ROWS]
    programs = [record_module(module, part, with_samples=OF_SAMPLES) for part in parts]
    counts = [count_loss_elements(program, part) for program, part in zip(programs, parts, strict=True)]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    loss = 0.0
    for program, part, count in zip(programs, parts, counts, strict=True):
        shared = share_loss(program)[0]
        stage = StageModule(shared, slice_program(shared, [])[0], module)
        used = {name: part[name] for name in stage.part.batch_entries}
        result = stage(loss_scales=loss_scales(program, count, totals), **used)
        result.backward()
        loss += result.item()
    gradients = [each.grad.clone() for each in module.parameters() if each.grad is not None]
    module.zero_grad()
    return loss, gradients, programs


def whole(module: nn.Module) -> tuple[float, list[torch.Tensor]]:
    loss = module(**{name: value.clone() for name, value in BATCH.items()})
    loss.backward()
    gradients = [each.grad.clone() for each in module.parameters() if each.grad is not None]
    module.zero_grad()
    return loss.item(), gradients


def cross_entropy(y: torch.Tensor, labels: torch.Tensor, **options) -> torch.Tensor:
    return functional.cross_entropy(y.flatten(0, 1), labels.flatten(), **options)


def valid(labels: torch.Tensor) -> torch.Tensor:
    return labels != -100


def masked(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[:, 0] = -100
    return labels


EXACT: dict[str, Loss] = {
    "mean": lambda _m, y, _t, _l: y.square().mean(),
    "mean over dims": lambda _m, y, _t, _l: y.square().mean(dim=(0, 1, 2)),
    "mean of sums": lambda _m, y, _t, _l: y.square().sum(-1).mean(),
    "mse": lambda _m, y, t, _l: functional.mse_loss(y, t),
    "l1": lambda _m, y, t, _l: functional.l1_loss(y, t),
    "smooth l1": lambda _m, y, t, _l: functional.smooth_l1_loss(y, t),
    "huber": lambda _m, y, t, _l: functional.huber_loss(y, t),
    "soft margin": lambda _m, y, t, _l: functional.soft_margin_loss(y, t.sign() - 0.5),
    "binary": lambda _m, y, t, _l: functional.binary_cross_entropy(y.sigmoid(), t),
    "binary with logits": lambda _m, y, t, _l: functional.binary_cross_entropy_with_logits(y, t),
    "labels, ragged (B38, B41)": lambda _m, y, _t, k: cross_entropy(y, k),
    "labels, summed": lambda _m, y, _t, k: cross_entropy(y, k, reduction="sum"),
    "labels, masked by hand": lambda _m, y, _t, k: (
        (cross_entropy(y, k, reduction="none") * valid(k).flatten()).sum() / valid(k).sum()
    ),
    "divisor kept from zero (B41)": lambda _m, y, _t, k: (
        (y.square().sum(-1) * valid(k)).sum() / valid(k).sum().clamp(min=1)
    ),
    "divisor read as a number (B43)": lambda _m, y, _t, k: (
        cross_entropy(y, k, reduction="sum") / int(valid(k).sum())
    ),
    "sum": lambda _m, y, t, _l: (y - t).square().sum(),
    "sum over a constant": lambda _m, y, t, _l: (y - t).square().sum() / 6,
    "sum over the number of samples (B40)": lambda _m, y, t, _l: (y - t).square().sum() / y.shape[0],
    "sum over the number of tokens": lambda _m, y, t, _l: (y - t).square().sum() * 0.5 / y.shape[:2].numel(),
    "two terms (B39)": lambda _m, y, t, k: cross_entropy(y, k) + 0.3 * functional.mse_loss(y, t),
    "difference, negated and halved": lambda _m, y, t, _l: -(y.mean() - functional.l1_loss(y, t)) / 2,
    "penalty on weights": lambda m, y, t, _l: (
        functional.mse_loss(y, t) + 0.1 * m.linear.weight.square().sum()
    ),
    "norm of weights": lambda m, y, t, _l: functional.mse_loss(y, t) + m.linear.weight.norm(),
    "sum of a stack": lambda _m, y, t, _l: torch.stack([functional.mse_loss(y, t), y.abs().sum()]).sum(),
    "mean of a stack of sums": lambda _m, y, t, _l: (
        torch.stack([(y - t).square().sum(), y.abs().sum()]).mean()
    ),
    "weights of a stack": lambda _m, y, t, _l: (
        torch.stack([functional.mse_loss(y, t), y.abs().sum()]) * torch.tensor([0.3, 0.7]).double()
    ).sum(),
    "a sum twice, as it is and as a mean": lambda _m, y, t, _l: (
(total := (y - t).square().sum()) / len(y) + 0.1 * total
    ),
    "a penalty that is a factor too": lambda m, y, t, _l: (
        functional.mse_loss(y, t)
        + (penalty := m.linear.weight.square().sum())
        + (y * penalty).mean()
    ),
    "learned uncertainty": lambda m, y, t, _l: ((-m.noise).exp() * (y - t).square()).mean() + m.noise,
    "learned uncertainty outside": lambda m, y, t, _l: (-m.noise).exp() * functional.mse_loss(y, t) + m.noise,
    "mean times the number of samples": lambda _m, y, t, _l: functional.mse_loss(y, t) * len(y),
    "a constant on top": lambda _m, y, t, _l: 1 - functional.mse_loss(y, t) + 3,
    "a detached term on top": lambda _m, y, t, _l: functional.mse_loss(y, t) + t.square().mean(),
    "weighted samples": lambda m, y, t, _l: (
        ((y - t).square().mean((1, 2)) * m.weights).sum() / m.weights.sum()
    ),
    "weighted samples, divisor kept from zero": lambda m, y, t, _l: (
        ((y - t).square().mean((1, 2)) * m.weights).sum() / m.weights.sum().clamp(min=1)
    ),
    "weighted samples, one more": lambda m, y, t, _l: (
        ((y - t).square().mean((1, 2)) * m.weights).sum() / (m.weights.sum() + 1)
    ),
    "a mean over samples, then a sum": lambda _m, y, _t, _l: y.mean(0).sum(),
    "a sum that no sample goes into": lambda m, y, t, _l: (
        functional.mse_loss(y, t) + (m.linear.weight[0] - m.prior).square().sum()
    ),
    "written in place": lambda _m, y, t, _l: functional.mse_loss(y, t).add_(y.abs().mean()).mul_(2),
    "labels masked through a view": lambda _m, y, _t, k: cross_entropy(y, masked(k)),
    "labels masked in the batch": lambda _m, y, _t, k: cross_entropy(y, k.masked_fill_(k == 1, -100)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_micro_batches_add_up_to_the_whole_batch(name: str) -> None:
    """Loss and gradients of 3, 2 and 1 samples with their shares are those of all 6, without a warning."""
    module = build(lambda: Losing(EXACT[name]))
    loss, gradients = whole(module)
    found, found_gradients, programs = summed_over_micro_batches(module)
    assert found == pytest.approx(loss, rel=1e-12)
    for left, right in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)
    assert [program.warnings for program in programs] == [[], [], []]


INEXACT: dict[str, Loss] = {
    "product of means": lambda _m, y, t, _l: y.square().mean() * (y - t).square().mean(),
    "quotient of means": lambda _m, y, t, _l: y.square().mean() / (y - t).square().mean(),
    "square root of a mean": lambda _m, y, t, _l: functional.mse_loss(y, t).sqrt(),
    "largest element": lambda _m, y, _t, _l: y.max(),
    "weighted labels": lambda _m, y, _t, k: cross_entropy(y, k, weight=torch.arange(1.0, 6.0).double()),
    "mean over a mask's size": lambda _m, y, _t, k: y.square().mean() / valid(k).sum(),
    "sum over the root of the samples": lambda _m, y, _t, _l: y.square().sum() / y.shape[0] ** 0.5,
    "a term on two ways": lambda _m, y, t, _l: (
        (both := (y - t).square().sum() + y.abs().sum()) / len(y) + 0.1 * both
    ),
    "one sample after another": lambda _m, y, t, _l: (
        sum(functional.mse_loss(y[i], t[i]) for i in range(len(y))) / len(y)
    ),
    "spread of means": lambda _m, y, t, _l: functional.mse_loss(y, t) + y.softmax(-1).mean(0).square().sum(),
    "pairs": lambda _m, y, _t, _l: (y[:, None] - y[None]).square().mean(),
    "divided by a sum of means": lambda m, y, _t, _l: y.square().sum() / m.weights.mean(),
}  # fmt: skip

MIXED: dict[str, Loss] = {
    "centred": lambda _m, y, t, _l: functional.mse_loss(y - y.mean(0), t),
    "contrastive": lambda _m, y, t, _l: cross_entropy_of_pairs(y.flatten(1) @ t.flatten(1).T),
    "softmax over samples": lambda _m, y, t, _l: functional.mse_loss(y.softmax(0), t),
    "weights of mean one": lambda m, y, _t, _l: (y.mean((1, 2)) * m.weights / m.weights.mean()).mean(),
}  # fmt: skip


def cross_entropy_of_pairs(similarity: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(similarity, torch.arange(len(similarity)))


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_meet_are_said(name: str) -> None:
    """What compares samples sees those of one micro-batch only, and that is said."""
    program = record_module(build(lambda: Losing(MIXED[name])), BATCH)
    assert any("brings samples together" in warning for warning in program.warnings)


@pytest.mark.parametrize("name", INEXACT)
def test_what_does_not_add_up_is_said(name: str) -> None:
    """Losses that are no sum over samples have a warning, and their sample-weighted mean is taken."""
    module = build(lambda: Losing(INEXACT[name]))
    program = record_module(module, BATCH)
    assert any("neither a mean nor a sum" in warning for warning in program.warnings)


def test_a_model_without_a_loss_has_no_terms() -> None:
    """Two outputs, none of them named loss: there is nothing to scale."""
    program = record_module(build(lambda: nn.Linear(8, 5)), (X,))
    assert program.loss_value is None
    assert program.loss_terms == ()
