"""Noise from a generator that the forward seeds is refused; one that the module holds draws on."""

import pytest
import torch
from torch import nn

from model.tiny_models import build
from outsize.errors import RecordingError
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule

X = torch.ones(2, 4, dtype=torch.float64)


class Noisy(nn.Module):
    """Adds noise between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.held = torch.Generator().manual_seed(3)

    def generator(self) -> torch.Generator:
        """Return what the noise is drawn from."""
        return self.held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        generator = self.generator()
        for _ in range(2):
            hidden = hidden + torch.randn(4, generator=generator, dtype=x.dtype)
        return self.second(hidden).square().mean()


class Making(Noisy):
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(0)


class Seeding(Noisy):
    def generator(self) -> torch.Generator:
        return self.held.manual_seed(0)


@pytest.mark.parametrize("noisy", [Making, Seeding])
def test_a_generator_seeded_in_the_forward_is_refused(noisy: type[Noisy]) -> None:
    """Every forward would have the same noise, a recording other noise each time; the line is named."""
    module = build(noisy)
    before = module.held.get_state()
    with pytest.raises(RecordingError, match=r"makes or seeds, at .*test_generators\.py:\d+"):
        record_module(module, X)
    assert torch.equal(module.held.get_state(), before)


def test_a_generator_that_the_module_holds_draws_as_in_the_module() -> None:
    """Recording draws nothing, and runs of the stages draw on as forwards of the module do."""
    module = build(Noisy)
    program = record_module(module, X)
    (part,) = slice_program(program, [])
    stage = StageModule(program, part, module)
    (entry,) = (str(node.target) for node in program.nodes if node.kind == "input")
    found = [stage(**{entry: X}).item() for _ in range(2)]
    module.held.manual_seed(3)
    assert found == [module(X).item() for _ in range(2)]
    assert found[0] != found[1]
