"""Families of models, recorded and cut everywhere: gradients as of the whole model, bytes as predicted."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coverage_families import FAMILIES
from outsize.model.cuts import cut_points, find_cut
from outsize.model.record import record_module
from sliced_run import even_cuts, run_sliced, run_whole, worst_relative_error

TOLERANCE = 1e-12
QUICK = (
    "llama_tied", "gpt2", "mixtral", "t5", "vit", "bert", "wav2vec2", "diffusion_unet", "lstm",
    "nn_transformer", "dlrm", "dict_to_dataclass", "alternating_branch", "deep_equilibrium",
)  # fmt: skip
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_every_legal_cut_gives_the_whole_models_gradients(name: str) -> None:
    """Two stages at every legal cut and 3 and 4 even stages: loss, gradients and bytes sent are exact."""
    family = FAMILIES[name]
    loss, expected = run_whole(family.build(), family.batch())
    module = family.build()
    program = record_module(module, family.batch())
    cuts = cut_points(program)
    bytes_at = {cut.node_index: cut.num_bytes for cut in cuts}
    tried = [[cut.node_index] for cut in cuts]
    tried += [chosen for n in (3, 4) if (chosen := even_cuts(program, module, list(bytes_at), n))]
    for positions in tried:
        found_loss, found, sent_bytes = run_sliced(program, positions, module, family.batch())
        assert found_loss == pytest.approx(loss, rel=TOLERANCE)
        assert worst_relative_error(found, expected) < TOLERANCE
        if len(positions) == 1:
            assert sent_bytes == [bytes_at[positions[0]]]


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "t5", "vit", "bert", "diffusion_unet"])
def test_operator_recordings_are_cut_at_the_same_places(name: str) -> None:
    """A plan's cut labels are found again in a recording of operators alone, with exact gradients."""
    family = FAMILIES[name]
    loss, expected = run_whole(family.build(), family.batch())
    module = family.build()
    labels = [cut.label for cut in cut_points(record_module(module, family.batch()))]
    program = record_module(module, family.batch(), granularity="operators")
    for label in labels[:: max(1, len(labels) // 3)]:
        found_loss, found, _ = run_sliced(program, [find_cut(program, label)], module, family.batch())
        assert found_loss == pytest.approx(loss, rel=TOLERANCE)
        assert worst_relative_error(found, expected) < TOLERANCE


def test_all_families_of_the_table_are_covered() -> None:
    """The table names 36 families; none may quietly go missing."""
    assert len(FAMILIES) == 36
    assert set(QUICK) < set(FAMILIES)


def test_what_a_block_hands_on_unchanged_does_not_cross_a_cut() -> None:
    """A mask that every block hands on is recomputed or read from the batch, never sent."""
    family = FAMILIES["dict_to_dataclass"]
    program = record_module(family.build(), family.batch())
    for number, cut in enumerate(cut_points(program), start=1):
        specs = [program.specs[value] for value in cut.crossing]
        assert len(specs) == number  # the hidden states so far: all are part of the output
        assert all(spec.requires_grad for spec in specs)


class Counting(nn.Module):
    """Sends an integer and a boolean made from what parameters made, beside the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        order, positive = x.argsort(dim=1), x.detach() > 0
        y = self.second(x)
        return (y.gather(1, order) * positive).mean()


def test_integers_booleans_and_detached_values_travel_without_gradient() -> None:
    """Rows B175 and B176: the stage sends int64 and bool beside floats; gradients are exact."""
    family = FAMILIES["llama"]
    module = replace(family, factory=Counting).build()
    batch = (torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4),)
    program = record_module(module, batch)
    (cut,) = cut_points(program)
    specs = [program.specs[value] for value in cut.crossing]
    assert {(spec.dtype, spec.requires_grad) for spec in specs} == {
        (torch.float64, True),
        (torch.int64, False),
        (torch.bool, False),
    }
    loss, expected = run_whole(module, batch)
    found_loss, found, _ = run_sliced(program, [cut.node_index], module, batch)
    assert found_loss == loss
    assert worst_relative_error(found, expected) < TOLERANCE
