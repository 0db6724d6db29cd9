"""Build a module without memory now and compute its initial values later, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from outsize.errors import ModelError, OutsizeError
from outsize.model.factory_log import FactoryLog
from outsize.model.unrecordable import refuse_parameter_hooks, refuse_unrecordable

__all__ = ["DeferredModel", "apply_materialised", "build_deferred"]

Select = Callable[[str, torch.Tensor], torch.Tensor]


class DeferredModel:
    """A module on the meta device, and the log from which its values follow.

    Values depend on the seed and on the tensor's full name only, never on which other tensors are computed
    or where. The numbers differ from those of calling the factory directly; the distributions are the same.
    """

    def __init__(self, module: nn.Module, log: FactoryLog) -> None:
        self.module = module
        self.log = log
        self.tensors: dict[str, torch.Tensor] = {
            **dict(module.named_buffers(remove_duplicate=False)),
            **dict(module.named_parameters(remove_duplicate=False)),
        }
        self._aliases = self._find_aliases()
        for name, tensor in reversed(self.tensors.items()):
            if tensor.is_meta:
                log.names[tensor.untyped_storage()._cdata] = self._aliases[name]

    def _find_aliases(self) -> dict[str, str]:
        """Return the first name of the tensor that each name stands for."""
        first_names: dict[int, str] = {}
        return {name: first_names.setdefault(id(tensor), name) for name, tensor in self.tensors.items()}

    @property
    def ties(self) -> dict[str, str]:
        """Names of tied tensors mapped to the first name of the same tensor."""
        return {name: first for name, first in self._aliases.items() if name != first}

    def is_missing(self, name: str) -> bool:
        """Whether the module still holds what the factory made for this name: nothing was put there since."""
        owner, _, leaf = name.rpartition(".")
        holder = self.module.get_submodule(owner)
        held = holder._parameters.get(leaf, holder._buffers.get(leaf))
        return held is self.tensors[self._aliases[name]]

    def materialise(
        self,
        names: Iterable[str],
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        select: Select | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the initial values of the named parameters and buffers.

        ``select(name, whole)`` may keep a part; one whole tensor is alive at a time. Tied names share one
        tensor.

        Raises:
            ModelError: a name is neither a parameter nor a buffer of the module.
        """
        made: dict[str, torch.Tensor] = {}
        result: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in self._aliases:
                raise ModelError(f"{type(self.module).__name__} has no parameter or buffer named {name}")
            first = self._aliases[name]
            if first not in made:
                made[first] = self._compute(first, torch.device(device), seed, select)
            result[name] = made[first]
        return result

    def _compute(self, name: str, device: torch.device, seed: int, select: Select | None) -> torch.Tensor:
        tensor = self.tensors[name]
        whole = self.log.replay(tensor, seed) if tensor.is_meta else tensor.detach().clone()
        kept = whole if select is None else select(name, whole)
        owns_more = kept.untyped_storage().nbytes() > kept.numel() * kept.element_size()
        return (kept.contiguous().clone() if owns_more else kept.contiguous()).to(device)


def build_deferred(factory: Callable[[], nn.Module], *, seed: int = 0) -> DeferredModel:
    """Run ``factory`` with every tensor on the meta device and keep how its tensors are filled.

    Raises:
        ModelError: the factory fails, or returns something that is not a module.
        RecordingError: the module is of a kind that cannot be recorded.
    """
    if isinstance(factory, nn.Module):
        raise ModelError(
            f"a {type(factory).__name__} was given in place of a function that builds it",
            why="every process builds its own part, and none the whole",
            attempt="a function, or a class, that returns the module when it is called without arguments",
        )
    log = FactoryLog(seed)
    try:
        with torch.random.fork_rng(devices=[]), log.watching():
            torch.manual_seed(seed)
            module = factory()
    except OutsizeError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model factory failed: {type(error).__name__}: {error}",
            why="it is run once without memory, with every tensor on the meta device",
            attempt="check that the factory runs by itself; values it reads and writes must go through torch",
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"the model factory returned {type(module).__name__}, not a torch.nn.Module",
            attempt="return the module",
        )
    refuse_unrecordable(module)
    _refuse_lazy(module)
    refuse_parameter_hooks(module)
    return DeferredModel(module, log)


def _refuse_lazy(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name} has no shape yet",
                why="lazy modules get theirs from the first batch, and parameters are planned before it",
                attempt="give the sizes, or call the module once in the factory",
            )


def apply_materialised(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put tensors in the place of the module's parameters and buffers of those names.

    Every place that holds the same parameter gets the same new one, with its gradient flag and attributes.
    """
    replacements: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        old = holder._parameters.get(leaf)
        if old is not None:
            replacements.setdefault(id(old), _parameter_like(old, tensor))
        elif isinstance(holder._buffers.get(leaf), torch.Tensor):
            replacements.setdefault(id(holder._buffers[leaf]), tensor)
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for leaf, held in list(table.items()):
                if id(held) in replacements:
                    table[leaf] = replacements[id(held)]  # type: ignore[assignment]


def _parameter_like(old: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # such as what an optimizer is told of it
    return new
