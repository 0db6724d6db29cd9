"""How a plan's state lies over the ``fsdp`` axis, and what stands in its modules.

state_sharding       in the modules         trained, and given to the optimizer
none                 whole parameters       the same
optimizer_states     whole parameters       views of this process's rows (ZeRO-1)
gradients            whole parameters       views of this process's rows (ZeRO-2)
full                 this process's rows    the same (FSDP, ZeRO-3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from outsize.model.deferred import DeferredModel
from outsize.plan.plan import Plan
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.parameter_unit import Member, ParameterUnit
from outsize.runtime.row_shards import RowShards

__all__ = ["StateSharding"]

BUCKET_BYTES = 25 * 2**20  # of parameters gathered at a time after an update

Select = Callable[[str, torch.Tensor], torch.Tensor]


class StateSharding:
    """Says of each parameter what this process trains; makes the units that stages gather."""

    def __init__(self, deferred: DeferredModel, plan: Plan, mesh: ProcessMesh) -> None:
        self.level = plan.state_sharding if mesh.mesh.fsdp > 1 else "none"
        self.group = mesh.group("fsdp")
        self.shards = RowShards(mesh.mesh.fsdp, mesh.coordinates["fsdp"])
        self._ties = deferred.ties
        self._parameter_names = {name for name, _ in deferred.module.named_parameters()}
        self._shapes: dict[str, torch.Size] = {}
        self._trained: dict[str, nn.Parameter] = {}
        self._units: dict[tuple[str, ...], ParameterUnit] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether a process trains only some rows of each parameter."""
        return self.level != "none"

    @property
    def gathers_in_stages(self) -> bool:
        """Whether stages gather parameters or reduce gradients block by block."""
        return self.level in {"gradients", "full"}

    def select(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what is held from the beginning of a parameter (or of its shard over ``tp``)."""
        if name not in self._parameter_names:
            return whole
        self._shapes[name] = whole.shape
        return self.shards.own(whole) if self.level == "full" else whole

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter before its rows are divided."""
        return self._shapes[self._ties.get(name, name)]

    def trained(self, name: str, held: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer updates of the parameter that stands in the module."""
        if self.level not in {"optimizer_states", "gradients"}:
            return held
        name = self._ties.get(name, name)
        if name not in self._trained:
            rows = self.shards.own(held.detach())
            self._trained[name] = nn.Parameter(rows, requires_grad=held.requires_grad)
        return self._trained[name]

    def unit(self, parameters: Mapping[str, nn.Parameter]) -> ParameterUnit:
        """Return the unit of parameters that stand in the module; the same for the same names."""
        names = tuple(self._ties.get(name, name) for name in parameters)
        if names not in self._units:
            members = [
                Member(self.trained(name, held), held, self.shape(name)) for name, held in parameters.items()
            ]
            self._units[names] = ParameterUnit(
                members, self.shards, self.group if self.is_sharded else None, is_sharded=self.level == "full"
            )
        return self._units[names]

    def reduce_gradients(self, held: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of whole parameters, and leave to each process those of its rows (ZeRO-1)."""
        for bucket in self._buckets(held):
            self._reduce(bucket)

    def _reduce(self, bucket: Mapping[str, nn.Parameter]) -> None:
        for reduce in self.unit(bucket).start_reduce([each.grad for each in bucket.values()]):
            reduce.finish()
        for each in bucket.values():
            each.grad = None

    def update_modules(self, held: Mapping[str, nn.Parameter]) -> None:
        """Bring parameters that stand whole in the modules up to date with the rows that were updated."""
        if self.level not in {"optimizer_states", "gradients"}:
            return
        for bucket in self._buckets(held):
            self._update(bucket)

    def _update(self, bucket: Mapping[str, nn.Parameter]) -> None:
        rows = {name: self.trained(name, each) for name, each in bucket.items()}
        members = [Member(row, row, self.shape(name)) for name, row in rows.items()]
        unit = ParameterUnit(members, self.shards, self.group, is_sharded=True)
        unit.start_gather().finish_in([each.detach() for each in bucket.values()])

    def _buckets(self, held: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
        bucket: dict[str, nn.Parameter] = {}
        num_bytes = 0
        for name, each in held.items():
            if not each.requires_grad:
                continue
            if bucket and num_bytes + each.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = {}, 0
            bucket[name] = each
            num_bytes += each.nbytes
        if bucket:
            yield bucket
