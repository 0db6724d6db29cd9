"""What a factory built, in short: two runs of one factory have to agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from outsize.model.block_signature import PLAIN, module_signature
from outsize.model.deferred import DeferredModel
from outsize.model.factory_log import LoggedOperation, View

__all__ = ["describe_tensors", "digest_model", "first_difference"]

_MISSING = ("missing", "")
_MAX_SAMPLED = 2**16  # elements of a tensor written out, spread over it, that are compared


def first_difference(first: DeferredModel, second: DeferredModel) -> str | None:
    """Say where two models built by one factory differ: in a tensor, in its values, or in a setting."""
    before, after = describe_tensors(first), describe_tensors(second)
    for name in sorted(before.keys() | after.keys()):
        (left, left_origin), (right, right_origin) = before.get(name, _MISSING), after.get(name, _MISSING)
        if left != right:
            return f"{name} is {left}, then {right}"
        if left_origin != right_origin:
            return f"{name} has other initial values the second time"
    names = [name or "the model" for name, _ in first.module.named_modules()]
    settings = zip(names, module_signature(first.module), module_signature(second.module), strict=False)
    for name, left_settings, right_settings in settings:
        if left_settings != right_settings:
            return f"{name} has other settings the second time"
    return None


def digest_model(deferred: DeferredModel) -> bytes:
    """Return 32 bytes that are the same for models with equal tensors, initial values and settings."""
    description = sorted(describe_tensors(deferred).items()), module_signature(deferred.module)
    return hashlib.sha256(repr(description).encode()).digest()


def describe_tensors(deferred: DeferredModel) -> dict[str, tuple[Any, str]]:
    """Return (shape, dtype, gradient flag) and the origin of the values of each parameter and buffer."""
    return {
        name: ((tuple(tensor.shape), tensor.dtype, tensor.requires_grad), _origin(deferred, tensor))
        for name, tensor in deferred.tensors.items()
    }


def _origin(deferred: DeferredModel, tensor: torch.Tensor) -> str:
    """Return a digest of all operations that decide a tensor's values, or of the values if it has them."""
    if not tensor.is_meta:
        return hashlib.sha256(_sample(tensor)).hexdigest()
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}
    for operation in deferred.log.operations_behind(tensor):
        for part in _describe(operation, numbers):
            digest.update(part)
    return digest.hexdigest()


def _describe(operation: LoggedOperation, numbers: dict[int, int]) -> Iterator[bytes]:
    """Yield what an operation does; storages are numbered in the order in which they come."""
    function = operation.function
    name = str(function) if isinstance(function, torch._ops.OpOverload) else function.__qualname__
    yield repr((name, operation.default_dtype, operation.is_whole_write)).encode()
    for argument in operation.arguments:
        if isinstance(argument, View):
            number = numbers.setdefault(argument.storage, len(numbers))
            yield repr((number, argument.shape, argument.stride, argument.offset, argument.dtype)).encode()
        elif isinstance(argument, torch.Tensor):
            yield _sample(argument)
        else:
            yield repr(argument if isinstance(argument, PLAIN) else type(argument).__qualname__).encode()
    for _, storage in operation.creates:
        numbers.setdefault(storage, len(numbers))


def _sample(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().reshape(-1)
    spread = values[:: max(1, len(values) // _MAX_SAMPLED)].contiguous().cpu()
    return repr((tuple(tensor.shape), tensor.dtype)).encode() + bytes(spread.view(torch.uint8).numpy())
