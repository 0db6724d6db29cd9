"""Record one forward of a module as a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_flatten_with_path

from outsize.errors import RecordingError
from outsize.model.autograd_functions import autograd_functions_recorded
from outsize.model.batch_entries import count_samples, flatten_batch, sample_entries
from outsize.model.execution import Execution, on_shapes, on_values
from outsize.model.gradient_flow import ArgumentGradients
from outsize.model.hooks import blocks_with_forward_hooks, unseen_changes_refused
from outsize.model.in_place_writes import apply_out_of_place
from outsize.model.index_ranges import Lookup, find_index_ranges, lookups_noted
from outsize.model.kept_attributes import Changes, kept_attributes
from outsize.model.lasting_tensors import RecordedTensors, caches_emptied
from outsize.model.leaves import choose_leaves, has_parameters, initially_open
from outsize.model.library_settings import constants_readable, training_settings
from outsize.model.loss_terms import find_loss_terms
from outsize.model.output_classes import register_dataclasses
from outsize.model.program import Node, NodeKind, Program, Rung, TensorSpec
from outsize.model.python_randomness import python_randomness_refused
from outsize.model.recorder import LeafMustOpen, Recorder
from outsize.model.repeated_calls import RepeatedCalls
from outsize.model.shared_buffers import spans_of_shared_buffers
from outsize.model.slice import tainted_nodes
from outsize.model.source import resize_batch
from outsize.model.unrecordable import refuse_unrecordable

__all__ = ["Granularity", "loss_tensor", "record_module"]

Granularity = Literal["blocks", "operators"]
Rungs = Callable[..., AbstractContextManager[Execution]]
_MAX_RECORDINGS = 60


def record_module(
    module: nn.Module,
    batch: Any,
    *,
    granularity: Granularity = "blocks",
    with_samples: frozenset[str] | None = None,
) -> Program:
    """Record ``module`` (on any device, meta included) called with ``batch``, without allocating memory.

    ``granularity="blocks"`` keeps blocks with parameters whole; ``"operators"`` records operators only.
    ``with_samples`` names the entries of the batch whose first dim counts samples, if others by chance have
    as many rows.

    Raises:
        RecordingError: the forward fails on tensors without values, or hides where a value comes from.
    """
    if with_samples is None:
        with_samples = sample_entries(flatten_batch(batch)[0])
    record = partial(_record, module, granularity=granularity, with_samples=with_samples)
    try:
        program = record(batch, on_shapes, reuse=True)
    except RecordingError as error:
        # perhaps a block was needed that only looked like an earlier one, or values are
        rung = on_values if _has_values(module, batch) else on_shapes
        program = record(batch, rung, reuse=False)
        if program.rung is Rung.REAL_TENSORS:
            program.warnings.append(f"recorded on real tensors, because {error.what}")
    find_loss_terms(program, partial(_with_more_samples, record, program, batch))
    return program


def _with_more_samples(
    record: Callable[..., Program], program: Program, batch: Any, times: int
) -> Program | None:
    """Record the same with so many times the samples, or return None where that cannot be."""
    try:
        larger = resize_batch(batch, times * program.num_samples, program.sample_entries)
        return record(larger, on_shapes, reuse=True)
    except (RecordingError, ValueError):
        return None


def _has_values(module: nn.Module, batch: Any) -> bool:
    tensors = [*module.parameters(), *module.buffers(), *flatten_batch(batch)[0].values()]
    return not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def _record(
    module: nn.Module,
    batch: Any,
    rung: Rungs,
    *,
    granularity: Granularity,
    with_samples: frozenset[str],
    reuse: bool,
) -> Program:
    refuse_unrecordable(module)
    entries, _ = flatten_batch(batch)
    opened = initially_open(module)
    for _ in range(_MAX_RECORDINGS):
        leaves = choose_leaves(module, opened) if granularity == "blocks" else []
        with caches_emptied(module) as recorded:
            program, changes = _attempt(module, batch, rung, leaves, recorded, reuse=reuse)
        if isinstance(program, LeafMustOpen):
            _open(module, opened, leaves, program.names)
            continue
        if changes.has_new_hooks and reuse:
            reuse = False  # blocks that were taken to be alike would have had them too
            continue
        program.sample_entries = with_samples
        program.num_samples = count_samples(entries, with_samples)
        program.warnings += changes.check(leaves)
        program.written_buffers = tuple(changes.written_buffers)
        program.shared_buffer_spans = spans_of_shared_buffers(program, module)
        return program
    raise RecordingError(
        f"the module could not be recorded in {_MAX_RECORDINGS} attempts",
        why="values kept leaving blocks by side channels",
        attempt="return such values from the block's forward instead of storing them on an object",
    )


def _attempt(
    module: nn.Module, batch: Any, rung: Rungs, leaves: list[str], recorded: RecordedTensors, *, reuse: bool
) -> tuple[Program | LeafMustOpen, Changes]:
    """Record with these leaves, or return which of them must open; note the tensors that were made."""
    entries, layout = flatten_batch(batch)
    with (
        training_settings(module),
        rung(module, entries) as execution,
        kept_attributes(module) as changes,
        python_randomness_refused(),
        constants_readable(execution.is_constant),
    ):
        args, kwargs = layout.restore(execution.entries)
        recorder = Recorder(module, execution)
        try:
            output, lookups = _run(recorder, module, leaves, args, kwargs, reuse=reuse)
            program = _finish(recorder, output)
            program.index_ranges = find_index_ranges(program, lookups, recorder.tensors)
        except LeafMustOpen as signal:
            return LeafMustOpen(signal.names), changes  # without what the traceback keeps alive
        finally:
            recorder.generators.put_back()
            given = {id(entry) for entry in entries.values()}
            recorded.note(tensor for tensor in recorder.all_tensors() if id(tensor) not in given)
    return program, changes


def _open(module: nn.Module, opened: set[str], leaves: list[str], names: set[str]) -> None:
    """Open the named leaves, and with them all leaves of the same class, so that alike blocks stay alike."""
    for name in names:
        leaf = module.get_submodule(name)
        if not any(has_parameters(child) for child in leaf.children()):
            raise RecordingError(
                f"a value leaves module {name} by a side channel",
                why="it is used outside, but is not among what its forward returns",
                attempt="return the value from forward",
            )
        opened.update(other for other in leaves if type(module.get_submodule(other)) is type(leaf))
        opened.add(name)


def _run(
    recorder: Recorder,
    module: nn.Module,
    leaves: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    reuse: bool,
) -> tuple[Any, list[Lookup]]:
    """Return the module's output, and what it looked up in tables."""
    repeated = RepeatedCalls() if reuse else None
    hooked = blocks_with_forward_hooks(module, leaves)  # before there are hooks that track modules
    with ExitStack() as stack:
        stack.enter_context(autograd_functions_recorded(recorder))
        stack.enter_context(unseen_changes_refused(recorder))
        for name in leaves:
            known = None if name in hooked else repeated
            stack.enter_context(_leaf_calls_recorded(recorder, name, module.get_submodule(name), known))
        lookups = stack.enter_context(lookups_noted(recorder, module))
        stack.enter_context(_track_modules(recorder, module))
        stack.enter_context(recorder)
        try:
            return module(*args, **kwargs), lookups
        except (LeafMustOpen, RecordingError):
            raise
        except Exception as error:
            raise RecordingError(
                f"the forward of {type(module).__name__} failed while it was recorded: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
                why=f"in module {recorder.module_stack[-1] or 'at the top'}; recording runs without values",
                attempt="check that the model runs with this batch; avoid branches on values of tensors",
            ) from error


@contextmanager
def _track_modules(recorder: Recorder, module: nn.Module) -> Iterator[None]:
    """Keep the recorder informed of the module whose forward is running."""
    handles = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(_entering(recorder, name), prepend=True))
        handles.append(child.register_forward_hook(_leaving(recorder), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(recorder: Recorder, name: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        recorder.module_stack.append(name)

    return hook


def _leaving(recorder: Recorder) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        recorder.module_stack.pop()

    return hook


@contextmanager
def _leaf_calls_recorded(
    recorder: Recorder, name: str, leaf: nn.Module, repeated: RepeatedCalls | None
) -> Iterator[None]:
    """Write a call of ``leaf`` as one node, its hooks included, while inside."""
    forward = leaf.forward
    has_hooks = bool(leaf._forward_hooks or leaf._forward_pre_hooks)
    held = [(part._parameters, dict(part._parameters)) for part in leaf.modules()]

    def record_call(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # with other parameters, as functional_call gives, it is not this block
        if recorder.leaf is not None or not _are_held(held):
            return run(*args, **kwargs)
        arguments = recorder.flatten_arguments(args, kwargs)
        versions = _versions(args, kwargs)
        recorder.leaf, recorder.leaf_is_random, recorder.leaf_detached = name, False, ()
        try:
            result = _run_or_repeat(recorder, run, leaf, repeated, args, kwargs)
        finally:
            recorder.leaf = None
        mutated = [tensor for tensor, version in versions if tensor._version != version]
        recorder.add_call(
            NodeKind.MODULE,
            name,
            arguments,
            result,
            mutated=mutated,
            is_random=recorder.leaf_is_random,
            detached=recorder.leaf_detached,
        )
        return result

    def call(*args: Any, **kwargs: Any) -> Any:
        return record_call(leaf._call_impl, args, kwargs)

    def call_forward(*args: Any, **kwargs: Any) -> Any:
        # called by itself it runs without hooks, which the recorded block would run
        return forward(*args, **kwargs) if has_hooks else record_call(forward, args, kwargs)

    with _replaced(leaf, "forward", call_forward), _replaced(leaf, "_compiled_call_impl", call):
        yield


def _are_held(tables: Sequence[tuple[Mapping[str, object], Mapping[str, object]]]) -> bool:
    """Tell whether modules have the same parameters as before, by each one's table now and then."""
    return all(now.get(name) is each for now, before in tables for name, each in before.items())


@contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Give a module another attribute while inside; it may have one of its own, set by a library."""
    own = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if own is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = own


def _versions(args: Any, kwargs: Any) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors among arguments with how often each was written in place so far."""
    return [
        (leaf, leaf._version) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)
    ]


def _run_or_repeat(
    recorder: Recorder,
    forward: Callable[..., Any],
    leaf: nn.Module,
    repeated: RepeatedCalls | None,
    args: Any,
    kwargs: Any,
) -> Any:
    """Run a block, or return what an alike call returned."""
    key = None if repeated is None else repeated.key(leaf, args, kwargs)
    known = None if repeated is None or key is None else repeated.result(key, args, kwargs)
    if known is not None:
        result, recorder.leaf_is_random, recorder.leaf_detached = known
        return result
    versions, gradients = _versions(args, kwargs), ArgumentGradients(args, kwargs)
    result = forward(*args, **kwargs)
    recorder.leaf_detached = gradients.detached(result)
    is_plain = all(tensor._version == version for tensor, version in versions)
    if repeated is not None and key is not None and is_plain:
        repeated.remember(key, args, kwargs, result, recorder.leaf_is_random, recorder.leaf_detached)
    return result


def _finish(recorder: Recorder, output: Any) -> Program:
    register_dataclasses(output)
    leaves, structure = tree_flatten(output)
    references = tuple(
        recorder.reference(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    )
    if recorder.escaped:
        raise LeafMustOpen(recorder.escaped)
    loss = loss_tensor(output)
    program = Program(
        nodes=[_with_own_gradient(recorder, node) for node in recorder.nodes],
        specs={
            value: TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for value, tensor in recorder.tensors.items()
        },
        outputs=references,
        output_structure=structure,
        constants=recorder.constants,
        storages={value: tensor.untyped_storage()._cdata for value, tensor in recorder.tensors.items()},
        guards=tuple(recorder.guards),
        rung=recorder.execution.rung,
        loss_value=None if loss is None else recorder.reference(loss).value,
    )
    apply_out_of_place(program)
    _refuse_guards_on_parameters(program)
    return program


def _with_own_gradient(recorder: Recorder, node: Node) -> Node:
    """Turn gradients on for a library's own operator: its kernel ran without, inside an autograd function."""
    has_gradient = any(recorder.tensors[value].requires_grad for value in node.outputs)
    if node.grad_enabled or not has_gradient or node.kind is not NodeKind.OPERATOR:
        return node
    return replace(node, grad_enabled=getattr(node.target, "namespace", "aten") not in ("aten", "prim"))


def _refuse_guards_on_parameters(program: Program) -> None:
    """Refuse numbers taken from tensors that training changes: the recording would keep the first ones."""
    tainted, producers = tainted_nodes(program), program.producers
    for guard in program.guards:
        if tainted[producers[guard.value]]:
            raise RecordingError(
                f"the forward takes a number from a tensor at {guard.source}",
                why="it depends on parameters or random numbers, so it changes while training",
                attempt="keep such numbers inside a block, or compute with tensors",
            )


def loss_tensor(output: Any) -> torch.Tensor | None:
    """Return the output named ``loss``, else the only scalar floating-point output.

    None if there is no such output, or the one named ``loss`` is no scalar.
    """
    scalars = []
    for path, leaf in tree_flatten_with_path(output)[0]:
        if not isinstance(leaf, torch.Tensor):
            continue
        key = path[-1] if path else None
        is_scalar = math.prod(leaf.shape) == 1 and leaf.is_floating_point()
        if "loss" in (getattr(key, "key", None), getattr(key, "name", None)):
            return leaf if is_scalar else None
        if is_scalar:
            scalars.append(leaf)
    without_dims = [each for each in scalars if not each.dim()]  # others may be one sample's
    found = without_dims or scalars
    return found[0] if len(found) == 1 else None
