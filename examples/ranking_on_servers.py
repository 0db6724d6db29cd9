"""Ranking as recommenders do it (DLRM), on data that every Python has: is a name in its library called?

Sparse features are hashed into tables larger than a worker's memory, which stay on parameter servers. See
docs/guides/parameter_server.md for the command.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

DIM = 16
TABLE_ROWS = {"name": 1 << 16, "pair": 1 << 19, "module": 1 << 8}  # 36 MiB in all
NUM_FILES = 30
_NAME = re.compile(r"([A-Za-z_]\w*)(\(?)")


class Ranker(nn.Module):
    """Embeddings and dense features meet in products of pairs; an MLP makes the answer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, DIM) for name, rows in TABLE_ROWS.items()})
        self.bottom = nn.Sequential(nn.Linear(2, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        num_pairs = len(TABLE_ROWS) * (len(TABLE_ROWS) + 1) // 2
        self.top = nn.Sequential(nn.Linear(DIM + num_pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(
        self, sparse: torch.Tensor, dense: torch.Tensor, called: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        bottom = self.bottom(dense)
        vectors = [bottom, *(table(sparse[:, at]) for at, table in enumerate(self.tables.values()))]
        pairs = [(one * other).sum(-1) for at, one in enumerate(vectors) for other in vectors[at + 1 :]]
        logits = self.top(torch.cat([bottom, torch.stack(pairs, -1)], -1)).squeeze(-1)
        return {"loss": functional.binary_cross_entropy_with_logits(logits, called), "logits": logits}


def build() -> nn.Module:
    return Ranker()


@cache
def examples() -> dict[str, tuple[torch.Tensor, ...]]:
    """Return every name in some files of the standard library: hashed features, dense ones, called or not."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_FILES]
    return {"train": _names(files[::2]), "validation": _names(files[1::2])}


def _names(files: list[Path]) -> tuple[torch.Tensor, ...]:
    sparse, dense, called = [], [], []
    for path in files:
        for line in path.read_text(errors="replace").splitlines():
            previous, indent = "", len(line) - len(line.lstrip())
            for name, parenthesis in _NAME.findall(line):
                texts = {"name": name, "pair": f"{previous} {name}", "module": path.stem}
                sparse.append([zlib.crc32(texts[key].encode()) % rows for key, rows in TABLE_ROWS.items()])
                dense.append([indent / 8, len(name) / 8])
                called.append(float(bool(parenthesis)))
                previous = name
    return torch.tensor(sparse), torch.tensor(dense), torch.tensor(called)


def batch(num_samples: int, *, step: int = 0, split: str = "train") -> dict[str, torch.Tensor]:
    sparse, dense, called = examples()[split]
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(len(called), (num_samples,), generator=generator)
    return {"sparse": sparse[rows], "dense": dense[rows], "called": called[rows]}
