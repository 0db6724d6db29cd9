"""The profile of a model from its recording: every block's costs, taken at two batch sizes.

Blocks are the slices between all legal cuts. Each distinct block runs forward and backward once per batch
size on fake tensors; amounts are then affine in the number of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from outsize.errors import RecordingError
from outsize.model.batch_entries import flatten_batch
from outsize.model.block_signature import slice_signature
from outsize.model.cuts import cut_points
from outsize.model.deferred import build_deferred
from outsize.model.fake import fake_tensor_like, fake_tensors_in
from outsize.model.model_sizes import bytes_per_element, model_fingerprint, num_bytes, tokens_per_sample
from outsize.model.profile import Amount, BlockProfile, ModelProfile
from outsize.model.program import CutPoint, Program, Rung
from outsize.model.record import record_module
from outsize.model.shapes import shapes_only
from outsize.model.slice import Slice, slice_program
from outsize.model.slice_cost import SavedValue, SliceCost, estimate_slice_cost
from outsize.model.source import ModelSource
from outsize.model.splittable import splittable_figures

__all__ = [
    "Recording",
    "profile_model",
    "profile_parameter_counts",
    "profile_recordings",
    "record_for_profile",
]

BATCH_SIZES = (2, 4)


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording with the batch it was made from."""

    num_samples: int
    batch: Any
    program: Program


def profile_model(source: ModelSource) -> ModelProfile:
    """Build ``source`` without memory, record it and return its profile.

    A forward that cannot be recorded leaves the last rung: parameter counts alone.

    Raises:
        ModelError: the model or its sample batch cannot be made.
    """
    module = build_deferred(source.factory).module
    batch = source.sample_batch(BATCH_SIZES[0])
    try:
        recordings = record_for_profile(module, source.sample_batch)
    except RecordingError as error:
        reason = error.what.strip().rstrip(".")
        return replace(profile_parameter_counts(module, batch, name=source.name), rung_reason=reason)
    return profile_recordings(module, recordings, name=source.name)


def profile_parameter_counts(module: nn.Module, batch: Any, *, name: str = "") -> ModelProfile:
    """Return a profile of one block that cannot be cut: parameters, buffers and a guess of the FLOPs.

    A multiplication and an addition for each parameter and token, twice that backward. A sample is guessed to
    keep as many bytes for backward as the parameters have: nine Hugging Face models had 0.3 to 38 times that,
    half of them 1.0 or less. Hence the wide bands of `cost.error_bands`.
    """
    tokens = tokens_per_sample(batch)
    parameters = dict(module.named_parameters())
    flops = Amount(2.0 * tokens * _count(parameters))
    block = BlockProfile(
        name="model",
        kind=type(module).__name__,
        num_parameters=_count(parameters),
        num_trainable_parameters=sum(p.numel() for p in parameters.values() if p.requires_grad),
        num_largest_parameter=max((p.numel() for p in parameters.values()), default=0),
        parameter_bytes=num_bytes(parameters.values()),
        forward_flops=flops,
        backward_flops=flops.scaled(2),
        bytes_moved=Amount(fixed=num_bytes(parameters.values())),
        saved_activation_bytes=Amount(per_sample=num_bytes(parameters.values())),
        recompute_input_bytes=Amount(),
        temporary_bytes=Amount(),
        output_bytes=Amount(),
        buffer_bytes=num_bytes(module.buffers()),
        parameter_names=tuple(parameters),
    )
    return ModelProfile(
        name=name,
        blocks=(block,),
        tokens_per_sample=tokens,
        rung=str(Rung.PARAMETER_COUNTS),
        fingerprint=model_fingerprint(module, []),
        bytes_per_element=bytes_per_element(module),
    )


def record_for_profile(module: nn.Module, sample_batch: Callable[[int], Any]) -> tuple[Recording, Recording]:
    """Record ``module`` at the two batch sizes that a profile is taken from."""
    small, large = (
        Recording(num_samples, batch := sample_batch(num_samples), record_module(module, batch))
        for num_samples in BATCH_SIZES
    )
    return small, large


def profile_recordings(
    module: nn.Module, recordings: tuple[Recording, Recording], *, name: str = ""
) -> ModelProfile:
    """Return the profile of ``module`` from its recordings at two batch sizes, made with equal cuts."""
    profiler = _Profiler(module, recordings)
    program = recordings[0].program
    return ModelProfile(
        name=name,
        blocks=profiler.blocks(),
        tokens_per_sample=tokens_per_sample(recordings[0].batch),
        rung=str(program.rung),
        rung_reason="; ".join(program.warnings) if program.rung is Rung.REAL_TENSORS else "",
        fingerprint=model_fingerprint(module, program.nodes),
        bytes_per_element=bytes_per_element(module),
    )


@dataclass(frozen=True, slots=True)
class _Sliced:
    """A recording, its cuts, its slices and their costs at one batch size."""

    recording: Recording
    cuts: list[CutPoint]
    slices: list[Slice]
    costs: list[SliceCost]
    saved_bytes: list[int]
    weight_bytes: list[int]


class _Profiler:
    def __init__(self, module: nn.Module, recordings: Sequence[Recording]) -> None:
        self.module = module
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.sliced = [self._slice(recording) for recording in recordings]

    def _slice(self, recording: Recording) -> _Sliced:
        program = recording.program
        cuts = cut_points(program)
        slices = slice_program(program, [cut.node_index for cut in cuts])
        costs = self._costs(recording, slices)
        saved = [(cost.saved_inside_bytes, cost.saved_values) for cost in costs]
        weight = [(cost.weight_inside_bytes, cost.weight_values) for cost in costs]
        return _Sliced(
            recording,
            cuts,
            slices,
            costs,
            _kept_bytes(program, slices, saved),
            _kept_bytes(program, slices, weight),
        )

    def _costs(self, recording: Recording, slices: list[Slice]) -> list[SliceCost]:
        """Return the cost of each slice; equal ones are run once."""
        program = recording.program
        entries, _ = flatten_batch(recording.batch)
        known: dict[Hashable, SliceCost] = {}
        costs = []
        signatures = [slice_signature(program, part, self.module) for part in slices]
        with shapes_only() as shapes, fake_tensors_in(self.module, shapes.mode):
            shapes.may_guess = True
            fakes = {key: fake_tensor_like(tensor, shapes.mode) for key, tensor in entries.items()}
            for part, signature in zip(slices, signatures, strict=True):
                if signature not in known:
                    known[signature] = estimate_slice_cost(program, part, self.module, fakes)
                costs.append(known[signature])
        return costs

    def blocks(self) -> tuple[BlockProfile, ...]:
        """Return the profile of every block, in order."""
        seen: set[str] = set()
        kinds = _Kinds()
        found = []
        for at, part in enumerate(self.sliced[0].slices):
            program = self.sliced[0].recording.program
            kind = kinds.name(slice_signature(program, part, self.module), self._classes(part))
            found.append(self._block(at, part, kind, seen))
        return tuple(found)

    def _classes(self, part: Slice) -> str:
        classes = [type(self.module.get_submodule(name)).__name__ for name in part.modules]
        return "+".join(f"{name}x{count}" if count > 1 else name for name, count in Counter(classes).items())

    def _block(self, at: int, part: Slice, kind: str, seen: set[str]) -> BlockProfile:
        parameters = self._parameters(part)
        own = {name: tensor for name, tensor in parameters.items() if name not in seen}
        tied = {name: tensor for name, tensor in parameters.items() if name in seen}
        seen.update(own)
        cut = self.sliced[0].cuts[at - 1] if at else None
        output_bytes = self._affine(lambda sliced: _output_bytes(sliced, at))
        input_bytes = self._affine(lambda sliced: _input_bytes(sliced, at))
        saved = self._affine(lambda sliced: sliced.saved_bytes[at])
        return BlockProfile(
            name=cut.label if cut else (part.modules[0] if part.modules else "start"),
            kind=kind,
            num_parameters=_count(own),
            num_trainable_parameters=sum(tensor.numel() for tensor in own.values() if tensor.requires_grad),
            num_largest_parameter=max((tensor.numel() for tensor in own.values()), default=0),
            parameter_bytes=num_bytes(own.values()),
            forward_flops=self._affine(lambda sliced: sliced.costs[at].forward_flops),
            backward_flops=self._affine(lambda sliced: sliced.costs[at].backward_flops),
            bytes_moved=self._affine(lambda sliced: sliced.costs[at].bytes_moved),
            saved_activation_bytes=saved,
            recompute_input_bytes=input_bytes,
            temporary_bytes=self._affine(lambda sliced: sliced.costs[at].temporary_bytes),
            output_bytes=output_bytes,
            cut_label=cut.label if cut else "",
            weight_gradient_bytes=self._affine(lambda sliced: sliced.weight_bytes[at]),
            buffer_bytes=self._buffer_bytes(part),
            parameter_names=tuple(own),
            tied_parameter_names=tuple(tied),
            num_tied_parameters=_count(tied),
            all_reduce_bytes=output_bytes,
            **splittable_figures(self.module, part, saved.of(1), input_bytes.of(1)),
        )

    def _affine(self, amount: Callable[[_Sliced], float]) -> Amount:
        small, large = (amount(sliced) for sliced in self.sliced)
        low, high = (sliced.recording.num_samples for sliced in self.sliced)
        per_sample = (large - small) / (high - low)
        return Amount(per_sample=per_sample, fixed=small - per_sample * low)

    def _parameters(self, part: Slice) -> dict[str, nn.Parameter]:
        """Return the parameters of a slice by their first full name in the model."""
        held = [self.module.get_parameter(name) for name in part.parameters]
        for name in part.modules:
            held += self.module.get_submodule(name).parameters()
        return {self.names[id(parameter)]: parameter for parameter in held}

    def _buffer_bytes(self, part: Slice) -> int:
        held = [self.module.get_buffer(name) for name in part.buffers]
        for name in part.modules:
            held += self.module.get_submodule(name).buffers()
        return num_bytes(held)


class _Kinds:
    """Names the kinds of blocks: their classes, with a number where two kinds have the same ones."""

    def __init__(self) -> None:
        self.names: dict[Hashable, str] = {}

    def name(self, signature: Hashable, classes: str) -> str:
        """Return the name of a kind, the same for equal signatures."""
        if signature not in self.names:
            base = classes or "operators"
            alike = sum(name.partition("#")[0] == base for name in self.names.values())
            self.names[signature] = f"{base}#{alike + 1}" if alike else base
        return self.names[signature]


def _count(tensors: dict[str, nn.Parameter]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _kept_bytes(
    program: Program, slices: list[Slice], kept: list[tuple[int, tuple[SavedValue, ...]]]
) -> list[int]:
    """Return what each slice keeps, inside and as values, beyond what an earlier one keeps already."""
    storage_bytes: dict[int, int] = {}
    for value, spec in program.specs.items():
        storage = program.storages[value]
        storage_bytes[storage] = max(storage_bytes.get(storage, 0), spec.num_bytes)
    seen: set[int] = set()
    totals = []
    for part, (inside_bytes, values) in zip(slices, kept, strict=True):
        total = inside_bytes
        for saved in values:
            storage = program.storages[saved.in_slice(program, part)]
            if storage not in seen:
                seen.add(storage)
                # a value received may be a view of something larger, which is kept as a whole
                total += (
                    max(saved.num_bytes, storage_bytes[storage]) if saved.position < 0 else saved.num_bytes
                )
        totals.append(total)
    return totals


def _output_bytes(sliced: _Sliced, at: int) -> int:
    return sliced.cuts[at].num_bytes if at < len(sliced.cuts) else 0


def _input_bytes(sliced: _Sliced, at: int) -> int:
    """Return the bytes a slice needs to be run again: what it receives and its part of the batch."""
    entries, _ = flatten_batch(sliced.recording.batch)
    part, program = sliced.slices[at], sliced.recording.program
    received = sum(program.specs[value].num_bytes for value in part.received)
    return received + sum(entries[name].numel() * entries[name].element_size() for name in part.batch_entries)
