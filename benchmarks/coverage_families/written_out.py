"""Models written out in plain torch whose shapes or control flow other splitters reject."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import register_dataclass

from coverage_families.family import VOCABULARY, Family, noise, token_ids

__all__ = ["WRITTEN_FAMILIES"]


class ResidualBlock(nn.Module):
    """Group norm, convolution and a time embedding added in between."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, inner)
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(16, outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.first(functional.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(functional.silu(h))


class DiffusionUNet(nn.Module):
    """Predicts noise: down, middle, up, with skips from every level to its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([ResidualBlock(8, 8), ResidualBlock(8, 16), ResidualBlock(16, 16)])
        self.middle = ResidualBlock(16, 16)
        self.up = nn.ModuleList([ResidualBlock(32, 16), ResidualBlock(32, 8), ResidualBlock(16, 8)])
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, steps: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        angles = steps[:, None] * torch.logspace(0, -3, 4, dtype=images.dtype)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.enter(images)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return functional.mse_loss(self.leave(x), target)


class Recurrent(nn.Module):
    """Embedding, two LSTMs, a head; the state travels as a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.first = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.second = nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, (hidden, cell) = self.first(self.embedding(ids))
        x, _ = self.second(x, (hidden[-1:], cell[-1:]))
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Translator(nn.Module):
    """torch's own nn.Transformer with embeddings and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, dtype=torch.float64)
        y = self.transformer(self.embedding(source), self.embedding(target[:, :-1]), tgt_mask=mask)
        return functional.cross_entropy(self.head(y).flatten(0, 1), target[:, 1:].flatten())


class Recommender(nn.Module):
    """DLRM-like: dense features and three tables, pairwise products, an MLP on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(50, 8, mode="sum") for name in ("a", "b", "c")})
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(
        self, dense: torch.Tensor, sparse: dict[str, torch.Tensor], clicked: torch.Tensor
    ) -> torch.Tensor:
        vectors = [self.bottom(dense)] + [self.tables[name](ids) for name, ids in sparse.items()]
        stacked = torch.stack(vectors, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        row, column = torch.triu_indices(4, 4, offset=1)
        features = torch.cat([vectors[0], products[:, row, column]], dim=1)
        return functional.binary_cross_entropy_with_logits(self.top(features)[:, 0], clicked)


@dataclass
class Answer:
    """What the model with a dataclass returns."""

    loss: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


register_dataclass(Answer)


class Mapped(nn.Module):
    """Takes one dict, passes dicts between blocks, returns a dataclass."""

    class Block(nn.Module):
        """Adds a projection of the state to it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, state: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
            x, mask = state["x"], state["mask"]
            assert x is not None
            y = torch.tanh(self.linear(x))
            return {"x": x + (y if mask is None else y * mask), "mask": mask, "unused": None}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mapped.Block() for _ in range(4))

    def forward(self, inputs: dict[str, torch.Tensor]) -> Answer:
        state: dict[str, torch.Tensor | None] = {"x": inputs["x"], "mask": inputs["mask"], "unused": None}
        hidden = []
        for block in self.blocks:
            state = block(state)
            assert state["x"] is not None
            hidden.append(state["x"])
        return Answer(hidden[-1].square().mean(), tuple(hidden))


class Alternating(nn.Module):
    """Every other layer sees a local mask: a Python branch on the layer's index."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])
        far = (positions[:, None] - positions[None, :]).abs() > 2
        for index, layer in enumerate(self.layers):
            if index % 2:  # noqa: SIM108 - the branch is what this family is about
                x = layer(x, src_mask=far)
            else:
                x = layer(x)
        return x.square().mean()


class Equilibrium(nn.Module):
    """One block called several times: its weights are shared over depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        injected = self.inject(x)
        z = torch.zeros_like(injected)
        for _ in range(5):
            z = torch.tanh(self.block(z) + injected)
        return functional.cross_entropy(self.head(z), labels)


def _recommendations() -> dict[str, object]:
    sparse = {name: token_ids(3, seed=at).remainder(50) for at, name in enumerate(("a", "b", "c"))}
    return {"dense": noise(4, 5), "sparse": sparse, "clicked": torch.tensor([0.0, 1.0, 1.0, 0.0])}


_FAMILIES = (
    Family(
        "diffusion_unet",
        DiffusionUNet,
        lambda: {
            "images": noise(4, 3, 16, 16),
            "steps": torch.tensor([1.0, 5.0, 9.0, 20.0]),
            "target": noise(4, 3, 16, 16, seed=1),
        },
    ),
    Family("lstm", Recurrent, lambda: {"ids": token_ids(), "labels": token_ids(seed=1)}),
    Family("nn_transformer", Translator, lambda: {"source": token_ids(6), "target": token_ids(7, seed=1)}),
    Family("dlrm", Recommender, _recommendations),
    Family("dict_to_dataclass", Mapped, lambda: ({"x": noise(4, 8), "mask": noise(4, 8, seed=1)},)),
    Family("alternating_branch", Alternating, lambda: (noise(4, 6, 16),)),
    Family("deep_equilibrium", Equilibrium, lambda: (noise(4, 8), torch.tensor([0, 1, 2, 3]))),
)

WRITTEN_FAMILIES = {family.name: family for family in _FAMILIES}
