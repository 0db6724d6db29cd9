"""Tiny models of many kinds, each with a batch, to see what can be recorded and split."""

from coverage_families.causal import CAUSAL_FAMILIES
from coverage_families.family import Family
from coverage_families.pretrained_kinds import PRETRAINED_FAMILIES
from coverage_families.written_out import WRITTEN_FAMILIES

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {**CAUSAL_FAMILIES, **PRETRAINED_FAMILIES, **WRITTEN_FAMILIES}
