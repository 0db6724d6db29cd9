"""Parameters that the loss does not depend on have no gradient in any pipeline, as in PyTorch, and stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.exact_training import assert_equal_to_reference, train
from helpers.models import train_reference
from helpers.processes import run_distributed
from outsize.model.gradient_flow import values_with_gradient
from outsize.model.program import NodeKind
from outsize.model.record import record_module
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec

OPTIMIZER = OptimizerSpec(weight_decay=0.1, max_gradient_norm=None)  # decay moves what has a zero gradient


class Layers(nn.Module):
    """Layers in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.second, self.third = (nn.Linear(4, 4) for _ in range(4))
        self.double()


class Side(Layers):
    """One layer makes an output that is only returned, and crosses a cut."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh()
        beside = self.beside(hidden)
        return {"loss": self.third(self.second(hidden).tanh()).square().mean(), "beside": beside}


class Extractor(Layers):
    """The second half does not train the first."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.beside(self.first(x).tanh()) * 2
        hidden = self.second(hidden.detach()).tanh()
        return {"loss": self.third(hidden).square().mean()}


class DetachingLinear(nn.Linear):
    """Detaches what it takes, unseen from outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


class DetachingBlocks(Layers):
    """Blocks that detach inside, alike ones, of which only the first is looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = (DetachingLinear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.beside(self.first(x).tanh())
        return {"loss": (self.second(hidden).sin().mean() + self.third(hidden).cos().mean())}


class DetachedTable(Layers):
    """Two stages use a parameter, neither with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.beside(self.first(x) @ self.table.detach()).tanh()
        hidden = self.second(hidden) @ self.table.detach()
        return {"loss": self.third(hidden).square().mean()}


MODELS: list[Callable[[], nn.Module]] = [Side, Extractor, DetachingBlocks, DetachedTable]
PLANS = [
    Plan(
        "pipeline_parallel",
        Mesh(pp=2),
        tuple(StageSpec(index, label) for index, label in enumerate(labels)),
        schedule,
        8,
        optimizer=OPTIMIZER,
    )
    for labels, schedule in (
        (("", "second"), ScheduleSpec("1f1b", 4)),
        (("", "beside", "second", "third"), ScheduleSpec("zb_v", 4, 2)),
    )
]


def make_batch(num_samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    return {"x": torch.randn(num_samples, 4, dtype=torch.float64, generator=generator)}


def train_all(_rank: int) -> None:
    """Compare each model under each plan: micro-batches of 2, 2, 1 and 1 samples, then of 1, 1 and 1."""
    data = [make_batch(6), make_batch(3), make_batch(6)]
    for model in MODELS:
        expected = train_reference(model, data, OPTIMIZER)
        for plan in PLANS:
            found = train(model, plan, data)
            assert_equal_to_reference(found, expected, plan)
            assert set(found.gradients) == set(expected[2]) & set(found.parameters)


@pytest.mark.distributed
def test_parameters_without_a_gradient_stay_in_a_pipeline() -> None:
    """They are for another output (after B175), or cut off by a detach, in a block or between blocks."""
    run_distributed(train_all, 2, timeout_s=100)


def test_a_recording_says_which_blocks_pass_gradients_on() -> None:
    """To the argument that was detached inside there is none; alike blocks are treated alike."""
    program = record_module(DetachingBlocks(), make_batch(2))
    found = values_with_gradient(program)
    made = {str(node.target): node.outputs[0] for _, node in program.nodes_of_kind(NodeKind.MODULE)}
    assert {name for name, value in made.items() if value in found} == {"second", "third"}


class Recomputing(nn.Module):
    """Runs a layer again in backward; what it takes from outside is not in autograd's graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unused = torch.zeros((), requires_grad=True)
        made: torch.Tensor = checkpoint(lambda _: self.inner(x), unused, use_reentrant=True)
        return made


class WritesAndRecomputes(Layers):
    """Gradients go through a write in place, and through a backward that the graph does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = Recomputing(self.beside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(x)
        rows[:, :2] = self.first(x)[:, :2]
        return self.third(self.beside(rows)).mean()


def test_gradients_are_not_lost_in_writes_and_hand_written_backwards() -> None:
    """All three blocks lead to the loss."""
    program = record_module(WritesAndRecomputes(), make_batch(2))
    found = values_with_gradient(program)
    blocks = [node for _, node in program.nodes_of_kind(NodeKind.MODULE)]
    assert [str(node.target) for node in blocks if node.outputs[0] in found] == ["first", "beside", "third"]
