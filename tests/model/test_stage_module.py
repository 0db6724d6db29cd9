"""Slices run whatever the user's model calls its parts."""

import torch
from torch import nn

from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule


class Names(nn.Module):
    """Uses names that a stage has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.program = nn.Parameter(torch.randn(4))
        self.register_buffer("training_share", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.part(x) * self.program + self.training_share).square().mean()


def test_a_model_may_have_names_that_a_stage_has():
    """The full names stay, and the result with them."""
    module, x = Names(), torch.randn(3, 4)
    for granularity in ("blocks", "operators"):
        program = record_module(module, (x,), granularity=granularity)
        stage = StageModule(program, slice_program(program, [])[0], module)
        assert dict(stage.named_parameters()).keys() == dict(module.named_parameters()).keys()
        assert torch.equal(stage(**{stage.part.batch_entries[0]: x}), module(x))
