"""The dispatch mode that writes down one forward: leaf calls whole, operators between them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from outsize.errors import RecordingError
from outsize.model.execution import Execution, has_mask
from outsize.model.fake import DEVICE_QUERY, device_of
from outsize.model.generators import ModuleGenerators
from outsize.model.output_classes import register_dataclasses
from outsize.model.program import Guard, Node, NodeKind, Ref
from outsize.model.user_frame import user_frame

__all__ = ["LeafMustOpen", "Recorder"]


class LeafMustOpen(Exception):  # noqa: N818 - a signal to record again, not an error
    """A value made inside these leaves is used outside them by a side channel."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        super().__init__(", ".join(sorted(self.names)))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes nodes while active. Every tensor seen is kept alive, so that ``id`` identifies it."""

    def __init__(self, module: nn.Module, execution: Execution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.execution = execution
        self.nodes: list[Node] = []
        self.tensors: dict[int, torch.Tensor] = {}  # value -> tensor
        self.constants: dict[str, torch.Tensor] = {}
        self.guards: list[Guard] = []
        self.escaped: set[str] = set()
        self.leaf: str | None = None  # the leaf whose forward is running
        self.leaf_is_random = False  # it drew random numbers
        self.leaf_detached: tuple[int, ...] = ()  # positions of arguments that it gave no gradient to
        self.module_stack: list[str] = [""]
        self._value_of: dict[int, int] = {}  # id(tensor) -> value
        self._value_at: dict[tuple[Any, ...], int] = {}  # memory and layout -> value, for re-wrapped tensors
        self._made_inside: dict[int, str] = {}  # id(tensor) -> leaf
        self._kept: list[torch.Tensor] = []
        self.generators = ModuleGenerators(module)
        self._attributes: dict[int, tuple[NodeKind, str]] = {}
        self._parameter_of: dict[int, str] = {}  # memory -> name
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._parameter_of.setdefault(_memory(parameter), name)
            self._attributes.setdefault(id(parameter), (NodeKind.PARAMETER, name))
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._attributes.setdefault(id(buffer), (NodeKind.BUFFER, name))
        for key, tensor in execution.entries.items():
            self._add(NodeKind.INPUT, key, [tensor])

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor seen."""
        yield from self.tensors.values()
        yield from self._kept

    # -- values ---------------------------------------------------------------------------------

    def reference(self, tensor: torch.Tensor) -> Ref:
        """Return the value a tensor stands for, making a node for a parameter, buffer or constant."""
        value = self._value_of.get(id(tensor))
        if value is not None:
            return Ref(value)
        if id(tensor) in self._attributes:
            kind, name = self._attributes[id(tensor)]
            return Ref(self._add(kind, name, [tensor]).outputs[0])
        if id(tensor) in self._made_inside:
            self.escaped.add(self._made_inside[id(tensor)])
        value = self._value_at.get(_memory_key(tensor))
        if value is not None:
            self._value_of[id(tensor)] = value
            self._kept.append(tensor)
            return Ref(value)
        if id(tensor) in self._made_inside:
            raise LeafMustOpen({self._made_inside[id(tensor)]})
        return self._constant(tensor)

    def _constant(self, tensor: torch.Tensor) -> Ref:
        content = tensor
        if isinstance(tensor, FakeTensor):
            if tensor.constant is None:
                raise RecordingError(
                    f"the forward uses a tensor of unknown origin, {tuple(tensor.shape)} {tensor.dtype}",
                    why="it is neither an input, a parameter, a buffer nor computed from them",
                    attempt="register it as a buffer (register_buffer) of the module that uses it",
                )
            content = tensor.constant
        name = f"constant_{len(self.constants)}"
        with unset_fake_temporarily():
            self.constants[name] = content.detach().clone()
        return Ref(self._add(NodeKind.CONSTANT, name, [tensor]).outputs[0])

    def _new_value(self, tensor: torch.Tensor) -> int:
        value = len(self.tensors)
        self.tensors[value] = tensor
        self._value_of[id(tensor)] = value
        self._made_inside.pop(id(tensor), None)
        self._value_at[_memory_key(tensor)] = value
        return value

    # -- nodes ----------------------------------------------------------------------------------

    def _add(
        self, kind: NodeKind, target: str | Callable[..., Any], outputs: Sequence[torch.Tensor], **fields: Any
    ) -> Node:
        node = Node(
            kind=kind,
            target=target,
            outputs=tuple(self._new_value(tensor) for tensor in outputs),
            grad_enabled=torch.is_grad_enabled(),
            module_path=self.module_stack[-1],
            **fields,
        )
        self.nodes.append(node)
        return node

    def add_call(
        self,
        kind: NodeKind,
        target: str | Callable[..., Any],
        arguments: tuple[list[Any], Any],
        result: Any,
        *,
        mutated: Sequence[torch.Tensor] = (),
        is_random: bool = False,
        detached: tuple[int, ...] = (),
    ) -> None:
        """Write a node for a call whose flattened arguments already hold references.

        An argument that a module returns as it is stays the value that it was.
        """
        register_dataclasses(result)
        leaves, _ = tree_flatten(result)
        given = {argument.value for argument in arguments[0] if isinstance(argument, Ref)}
        given -= {self._value_of[id(tensor)] for tensor in mutated if id(tensor) in self._value_of}
        positions = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
            and not (kind is NodeKind.MODULE and self._value_of.get(id(leaf)) in given)
        ]
        mutates = tuple(self._value_of[id(tensor)] for tensor in mutated if id(tensor) in self._value_of)
        self._add(
            kind,
            target,
            [leaves[index] for index in positions],
            arguments=tuple(arguments[0]),
            structure=arguments[1],
            output_positions=tuple(positions),
            num_results=len(leaves),
            mutates=mutates,
            is_random=is_random,
            detached=detached,
        )

    def flatten_arguments(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Return the flattened ``(args, kwargs)`` with references for tensors, and its structure."""
        register_dataclasses((args, kwargs))
        leaves, structure = tree_flatten((args, kwargs))
        for leaf in leaves:
            if _holds_recorded_tensors(leaf):
                caller = self.module_stack[-1] or "the model"
                raise RecordingError(
                    f"{caller} passes a {type(leaf).__name__} that holds tensors",
                    why="it is written to during the forward, so a block could not be called again with it",
                    attempt="turn off caches, or register the class with torch.utils._pytree",
                )
        return [
            self.reference(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ], structure

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and write it down, or only watch it when a leaf is running."""
        if func is DEVICE_QUERY:
            return device_of(args[0])
        kwargs = kwargs or {}
        if self.leaf is not None:
            self.leaf_is_random |= _draws_random_numbers(func, args, kwargs)
            result, _ = self.execution.run(func, args, kwargs, inside_leaf=True)
            self._watch(result, self.leaf)
            return result
        arguments = self.flatten_arguments(args, kwargs)
        self.generators.refuse_others(arguments[0])
        mutated = _written_arguments(func, args, kwargs)
        self._refuse_writes(mutated)
        result, is_read = self.execution.run(func, args, kwargs, inside_leaf=False)
        if mutated or any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(result)[0]):
            is_random = _draws_random_numbers(func, args, kwargs)
            self.add_call(NodeKind.OPERATOR, func, arguments, result, mutated=mutated, is_random=is_random)
        if is_read:
            self._add_guards(func, args, arguments[0], result)
        return result

    def _refuse_writes(self, mutated: Sequence[torch.Tensor]) -> None:
        """Refuse writes to parameters: every micro-batch would repeat them, and blocks would not know."""
        for tensor in mutated:
            name = self._parameter_of.get(_memory(tensor))
            if name is not None:
                raise RecordingError(
                    f"the forward writes into parameter {name} at {user_frame()}",
                    why="outside its block, and again for every micro-batch",
                    attempt="change parameters after the optimizer's step, or compute with a changed copy",
                )

    def _add_guards(self, func: Any, args: tuple[Any, ...], arguments: list[Any], result: Any) -> None:
        """Keep what was read from the batch, to check it for other batches."""
        source = user_frame()
        if has_mask(func, args):
            masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
            counts = self.execution.count_selected(masks)
            for mask, count in zip(masks, counts, strict=True):
                self.guards.append(Guard(self._value_of[id(mask)], count, source, len(self.nodes)))
            return
        if func is torch.ops.aten._local_scalar_dense.default:
            self.guards.append(Guard(arguments[0].value, result, source, len(self.nodes)))
            return
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise RecordingError(
                f"the forward compares values of the batch at {source}",
                why=f"{func} decides what is computed, and the recording keeps one way only",
                attempt="compute the answer outside the model and pass it in the batch",
            )
        for tensor in tensors:
            self.guards.append(
                Guard(self._value_of[id(tensor)], tuple(tensor.shape), source, len(self.nodes))
            )

    def _watch(self, result: Any, leaf: str) -> None:
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._value_of:
                if id(tensor) in self._attributes:
                    continue
                self._made_inside[id(tensor)] = leaf
                self._kept.append(tensor)


def _holds_recorded_tensors(leaf: Any) -> bool:
    """Tell whether an object that is no container holds tensors made while recording."""
    if isinstance(leaf, torch.Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
        return False
    return any(isinstance(value, FakeTensor) for value in tree_leaves(list(vars(leaf).values())))


def _draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operator is random with these arguments; attention without dropout is not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        _memory(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors an operator writes in place, by its schema."""
    if not func._schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor)]
    return written
