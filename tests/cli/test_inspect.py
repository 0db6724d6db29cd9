"""``outsize inspect``: blocks, costs and cuts of a recording, and one message for a mistake."""

import json
from pathlib import Path

from typer.testing import CliRunner

from outsize.cli.app import app

MODEL = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def build():
    return Chain()

def batch(num_samples):
    return torch.ones(num_samples, 8)
"""


def test_a_model_is_shown_with_its_repeats_and_cuts(tmp_path: Path) -> None:
    """Alike layers are one row; parameters and cuts are counted: 5 · (64 + 8) and 4."""
    path = tmp_path / "chain.py"
    path.write_text(MODEL)
    result = CliRunner().invoke(app, ["inspect", f"{path}:build"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "layers.1 … layers.3" in result.output
    assert "360 parameters" in result.output
    assert "4 legal cuts" in result.output


def test_json_holds_every_block(tmp_path: Path) -> None:
    """The JSON form is the profile with guards and warnings."""
    path = tmp_path / "chain.py"
    path.write_text(MODEL)
    found = json.loads(CliRunner().invoke(app, ["inspect", f"{path}:build", "--json"]).output)
    assert [block["cut_label"] for block in found["blocks"]] == ["", *(f"layers.{n}" for n in range(1, 5))]
    assert found["warnings"] == []
    assert found["rung"] == "fake_tensors"
