"""Dataclasses that models pass and return, made known to torch as containers of tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils._pytree import register_dataclass, tree_leaves

__all__ = ["register_dataclasses"]


def register_dataclasses(value: Any) -> None:
    """Let torch look into every dataclass within ``value``, also into those inside others."""
    for leaf in tree_leaves(value):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            continue
        fields = [each.name for each in dataclasses.fields(leaf) if each.init]
        if len(fields) == len(dataclasses.fields(leaf)):  # it can be made again from its fields
            register_dataclass(type(leaf), field_names=fields)
            register_dataclasses([getattr(leaf, name) for name in fields])
