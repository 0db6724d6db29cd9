"""Which modules a recording keeps whole: the leaf blocks."""

from __future__ import annotations

from torch import nn

__all__ = ["choose_leaves", "find_block_lists", "has_parameters", "initially_open"]

_MAX_BLOCK_CLASSES = 2  # a list of blocks has one class of block, or two that alternate
_LARGE_SHARE = 0.2  # a module with more of the parameters than this is opened, unless it is a listed block


def has_parameters(module: nn.Module) -> bool:
    """Tell whether the module or any part of it holds a parameter."""
    return next(module.parameters(), None) is not None


def find_block_lists(model: nn.Module) -> list[str]:
    """Return the names of the outermost lists of alike blocks, such as ``model.layers``."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and len({type(block) for block in module}) <= _MAX_BLOCK_CLASSES
        and has_parameters(module)
    ]
    return [
        name for name in names if not any(name.startswith(f"{other}.") for other in names if other != name)
    ]


def initially_open(model: nn.Module) -> set[str]:
    """Return the modules to look into at first: what encloses lists of blocks, and large unlisted modules."""
    opened = {""}
    for name in find_block_lists(model):
        parts = name.split(".")
        opened.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    total = sum(parameter.numel() for parameter in model.parameters())
    listed = {
        f"{name}.{child}"
        for name in find_block_lists(model)
        for child, _ in model.get_submodule(name).named_children()
    }
    for name, module in model.named_modules():
        inside_block = any(name == block or name.startswith(f"{block}.") for block in listed)
        if name in opened or inside_block or not _parent(name) <= opened:
            continue
        share = sum(parameter.numel() for parameter in module.parameters())
        branches = sum(has_parameters(child) for child in module.children())
        if branches > 1 and share > _LARGE_SHARE * total:
            opened.add(name)
    return opened


def _parent(name: str) -> set[str]:
    return {name.rpartition(".")[0]}


def choose_leaves(model: nn.Module, opened: set[str]) -> list[str]:
    """Return the modules kept whole: the outermost ones with parameters that are not opened.

    A module without parameters is recorded as operators, so that what depends on what stays exact.
    """
    leaves: list[str] = []

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name in opened or isinstance(child, nn.ModuleList | nn.ModuleDict):
                walk(child, full_name)
            elif has_parameters(child):
                leaves.append(full_name)

    walk(model, "")
    return leaves
