"""Factories that load, make or read values run without memory, and their tensors get these values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from outsize.errors import ModelError
from outsize.model.deferred import apply_materialised, build_deferred


def values_of(factory: Callable[[], nn.Module], name: str) -> torch.Tensor:
    return build_deferred(factory).materialise([name])[name]


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (torch.save, torch.load),
        (torch.save, lambda path: torch.load(path, mmap=True)),
        (save_file, load_file),
    ],
    ids=["torch", "mapped", "safetensors"],
)
def test_weights_of_a_file_are_the_initial_values(
    save: Callable[..., None], load: Callable[..., dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """As for fine-tuning a module of one's own; parameters that the file replaces are not drawn first."""
    given = nn.Linear(3, 2).state_dict()
    save(given, tmp_path / "weights")

    def factory() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        module[0].load_state_dict(load(tmp_path / "weights"))
        return module

    assert torch.equal(values_of(factory, "0.weight"), given["weight"])
    assert torch.equal(values_of(factory, "0.bias"), given["bias"])


def numbered(how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """A factory that fills a bias with what ``how`` makes of it."""

    def factory() -> nn.Module:
        module = nn.Linear(2, 4)
        with torch.no_grad():
            module.bias.copy_(how(module.bias))
        return module

    return factory


@pytest.mark.parametrize(
    "how",
    [
        lambda bias: torch.tensor([1.0, 2.0, 3.0, 4.0], device=bias.device),
        lambda bias: bias.new_tensor([1.0, 2.0, 3.0, 4.0]),
        lambda bias: torch.as_tensor([1, 2, 3, 4], device=bias.device, dtype=bias.dtype),
        lambda _: torch.unique(torch.tensor([3.0, 1.0, 2.0, 4.0, 1.0])),
        lambda _: torch.nonzero(torch.tensor([0, 1, 1, 1, 1]))[:, 0].float(),
        lambda _: torch.from_numpy(torch.arange(1.0, 5.0).numpy()),
        lambda _: torch.tensor(torch.arange(1, 5).tolist()).float(),
    ],
    ids=["device", "new", "as", "unique", "nonzero", "numpy", "tolist"],
)
def test_values_written_out_or_read_are_those_of_plain_torch(
    how: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A parameter says that it lies on the meta device, where a tensor of numbers would lose them."""
    assert values_of(numbered(how), "bias").tolist() == [1, 2, 3, 4]


def test_orthogonal_parametrizations_are_orthogonal() -> None:
    """Torch looks whether the values are orthogonal when it parametrizes them."""

    def factory() -> nn.Module:
        return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))

    deferred = build_deferred(factory)
    names = [*dict(deferred.module.named_parameters()), *dict(deferred.module.named_buffers())]
    apply_materialised(deferred.module, deferred.materialise(names))
    weight = deferred.module.weight.detach()
    assert torch.allclose(weight @ weight.T, torch.eye(4), atol=1e-5)


def test_numbers_read_from_drawn_values_are_those_of_the_parameter() -> None:
    """Scaled by its own norm, a weight has norm one, whatever the seed of the run."""

    def factory() -> nn.Module:
        module = nn.Linear(3, 3)
        module.weight.data /= module.weight.norm().item()
        return module

    weight = build_deferred(factory).materialise(["weight"], seed=5)["weight"]
    assert weight.norm().item() == pytest.approx(1.0, rel=1e-6)


def test_files_written_by_a_factory_are_refused(tmp_path: Path) -> None:
    """It would write what happens to lie in memory."""

    def factory() -> nn.Module:
        module = nn.Linear(2, 2)
        torch.save(module.state_dict(), tmp_path / "copy")
        return module

    with pytest.raises(ModelError, match="saves tensors"):
        build_deferred(factory)


def test_lazy_modules_are_refused_by_name() -> None:
    """Their parameters have no shape before the first batch."""
    with pytest.raises(ModelError, match=r"1\.weight has no shape yet"):
        build_deferred(lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))
