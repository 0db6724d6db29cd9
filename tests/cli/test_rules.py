"""The list of a model's operators with their splits."""

from pathlib import Path

from typer.testing import CliRunner

from outsize.cli.app import app

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).mean()

def build():
    return Model()

def batch(num_samples):
    return (torch.zeros(num_samples, 8),)
"""


def test_every_operator_is_listed_with_its_splits(tmp_path: Path):
    """The products split by rows and columns; the last line counts the operators that split."""
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    result = CliRunner().invoke(app, ["rules", f"{path}:build", "--degree", "2"])
    assert result.exit_code == 0, result.output
    assert "S0, R~, S1 -> S1" in result.output
    assert "split_mean" in result.output
    assert "6 of 6 distinct operators can be split over 2 devices." in result.output
