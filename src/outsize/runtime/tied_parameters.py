"""Parameters that several pipeline stages use: each rank holds a copy, and all copies stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from outsize.runtime.data_parallel import sum_gradients
from outsize.runtime.mesh import ProcessMesh

__all__ = ["TiedParameters"]


class TiedParameters:
    """Sums the gradients of shared parameters over the pipeline ranks that hold them.

    Copies begin equal (their values depend on seed and name only), get equal gradients, and are updated by
    the same rule: they stay equal bit by bit. ``names_by_rank`` lists the canonical names that each pipeline
    rank holds; it is the same on every process, so that all make the same groups in the same order.
    """

    def __init__(self, mesh: ProcessMesh, names_by_rank: Sequence[Sequence[str]]) -> None:
        holders: dict[str, tuple[int, ...]] = {}
        for rank, names in enumerate(names_by_rank):
            for name in dict.fromkeys(names):
                holders[name] = (*holders.get(name, ()), rank)
        self._here = mesh.coordinates["pp"]
        self._holders = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        self._groups = {ranks: _new_group(mesh, ranks) for ranks in sorted(set(self._holders.values()))}

    def is_counted_here(self, name: str) -> bool:
        """Whether this rank is the one that counts the parameter in a global norm."""
        return self._holders.get(name, (self._here,))[0] == self._here

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of shared parameters; ``parameters`` are this rank's, by canonical name.

        One that has no gradient on any rank, such as a detached one, stays without.
        """
        for holders, group in self._groups.items():
            if self._here in holders:
                shared = [parameters[name] for name, ranks in self._holders.items() if ranks == holders]
                sum_gradients([each for each in shared if each.requires_grad], group)


def _new_group(mesh: ProcessMesh, pipeline_ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Make one group for each position on the other axes; return this process's, if it is in one."""
    found = None
    pipelines = {tuple(mesh.mesh.ranks_along("pp", rank)) for rank in range(mesh.mesh.world_size)}
    for pipeline in sorted(pipelines):
        members = [pipeline[rank] for rank in pipeline_ranks]
        group = dist.new_group(members)
        if mesh.rank in members:
            found = group
    return found
