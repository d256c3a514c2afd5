"""Brings every document of a registry to this release's schema. Reading upgrades by itself; this writes it down."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.registry.registry import Registry


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """How many documents there are and how many were rewritten. Manifests never change."""

    schema_version: int
    heads: int
    heads_rewritten: int
    bases: int
    bases_rewritten: int
    shards_rewritten: int


async def upgrade(registry: Registry) -> UpgradeReport:
    """Rewrites heads, base contracts and index shards of an older schema. Safe to repeat, to interrupt and beside writers.

    Gateways of an older release can't read what was rewritten: upgrade them first. Raises the store's errors.
    """
    raise NotImplementedError
