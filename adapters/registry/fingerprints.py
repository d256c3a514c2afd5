"""What a changed base does to its adapters: a version remembers the base that it was checked against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adapters.names import AdapterRef
from adapters.types import BaseContract, Manifest


@dataclass(frozen=True, slots=True)
class Changed:
    """A version that was checked against another state of its base. Both fingerprints are SHA-256 (hex)."""

    ref: AdapterRef
    checked_against: str
    now: str


def changed(contract: BaseContract, manifests: Iterable[Manifest]) -> list[Changed]:
    """The versions of this base whose fingerprint is not the contract's, in the order given.

    They go on being served: their deltas are added to weights that they were not trained on, which may be right (the same
    weights stored anew) or badly wrong. Versions without a fingerprint, published before the base was known, are left out.
    """
    return [
        Changed(manifest.ref, manifest.base_fingerprint, contract.fingerprint)
        for manifest in manifests
        if manifest.ref.base == contract.base and manifest.base_fingerprint not in (None, contract.fingerprint)
    ]
