"""`loramux doctor`: each check tests one thing, says what it found, and proposes the repair."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from adapters.cli.gateway import Gateway
from adapters.cli.output import size
from adapters.cli.times import span
from adapters.cli.work import read_cache_settings
from adapters.errors import EngineUnavailable, LoraMuxError, StoreDenied, StoreError
from adapters.names import AdapterRef
from adapters.settings import read_registry_settings, read_webhook_settings
from adapters.types import AdapterEntry, BaseContract, Manifest

Status = Literal["ok", "warn", "fail", "skip"]

CLOCK_PREFIX = "doctor/clock-"
CLOCK_WARN_S = 5.0
CLOCK_FAIL_S = 600.0  # S3 refuses signatures that are a quarter of an hour off
READS_AT_ONCE = 16
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found. `hint` is the repair, where there is something to repair."""

    name: str
    status: Status
    message: str
    hint: str | None = None


@dataclass
class Patient:
    """What the checks examine; a check that finds out more leaves it here for the later ones."""

    config: Path | None
    gateway: Gateway
    gateway_was_named: bool
    registry: Any = None
    entries: list[AdapterEntry] = field(default_factory=list)
    contracts: dict[str, BaseContract] = field(default_factory=dict)
    gateway_answers: bool = False


async def examine(patient: Patient) -> list[Check]:
    """All checks, in order. One that needs what an earlier one did not find is skipped."""
    found = []
    for name, needs_registry, check in CHECKS:
        if needs_registry and patient.registry is None:
            found.append(Check(name, "skip", "needs the store"))
            continue
        try:
            found.append(await check(patient))
        except LoraMuxError as error:
            found.append(Check(name, "fail", error.message, error.hint))
    return found


async def check_settings(patient: Patient) -> Check:
    from adapters.registry import Registry
    from adapters.store import open_store

    settings = read_registry_settings(patient.config)
    read_webhook_settings(patient.config)
    patient.registry = Registry(open_store(settings))
    return Check("settings", "ok", f"the registry is {settings.url}")


async def check_store(patient: Patient) -> Check:
    start_s = time.monotonic()
    try:
        async for _ in patient.registry.store.list("registry.json"):
            break
    except StoreError as error:
        patient.registry = None
        what = "credentials" if isinstance(error, StoreDenied) else "store"
        return Check(what, "fail", f"{error.message} ({error.reason})", error.hint or STORE_HINTS.get(what))
    return Check("store", "ok", f"reachable, and the credentials are good ({(time.monotonic() - start_s) * 1000:.0f} ms)")


STORE_HINTS = {
    "store": "is it running, and is `registry.endpoint` its address?",
    "credentials": "check `registry.access_key_id` and the secret, or the environment's AWS credentials",
}


async def check_conditions(patient: Patient) -> Check:
    from adapters.store.conditional import probe

    found = await probe(patient.registry.store)
    if found.honoured:
        return Check("conditional writes", "ok", "honoured; writes are seen at once")
    broken = ", ".join(name.replace("_", " ") for name in found.broken)
    return Check(
        "conditional writes", "fail", f"broken: {broken}", "a registry needs a store that keeps them; nothing is published here"
    )


async def check_clock(patient: Patient) -> Check:
    store, key = patient.registry.store, f"{CLOCK_PREFIX}{uuid.uuid4().hex}"
    before_s = time.time()
    await store.create(key, b"what time is it?")
    try:
        there_s = (await store.stat(key)).modified_s
    finally:
        with contextlib.suppress(StoreError):
            await store.delete(key)
    return clock_check(there_s, before_s, time.time())


def clock_check(there_s: float, before_s: float, after_s: float) -> Check:
    """The store wrote at `there_s` by its clock, which may keep whole seconds, between two moments of ours."""
    skew_s = max(before_s - 1 - there_s, there_s - after_s, 0.0)
    if skew_s <= CLOCK_WARN_S:
        return Check("clock", "ok", "this clock and the store's agree")
    direction = "behind" if there_s > after_s else "ahead of"
    status: Status = "fail" if skew_s > CLOCK_FAIL_S else "warn"
    return Check(
        "clock", status, f"this clock is {span(skew_s)} {direction} the store's (limit {CLOCK_WARN_S:g} s)", "set up NTP"
    )


async def check_disk(patient: Patient) -> Check:
    cache = read_cache_settings(patient.config)
    used, free = await asyncio.to_thread(_disk, cache.dir)
    room = cache.budget_bytes - used
    text = f"{size(used)} of {size(cache.budget_bytes)} used, {size(free)} free on the disk"
    if free < room:
        hint = "make room, or lower `cache.budget_bytes`: the cache would fill the disk"
        return Check("node cache", "warn", text, hint)
    return Check("node cache", "ok", text)


def _disk(folder: Path) -> tuple[int, int]:
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return used, shutil.disk_usage(there).free


async def check_index(patient: Patient) -> Check:
    """By the listing that a sweep begins with; nothing is repaired here."""
    from adapters.cli.work import read_view

    listed = await patient.registry.truth.adapters()
    patient.entries = list((await read_view(patient.registry)).adapters())
    rows = {(entry.base, entry.name): entry for entry in patient.entries}
    behind = [f"{base}:{name}" for (base, name), found in listed.items() if not found.is_shown_by(rows.get((base, name)))]
    if behind:
        hint = "gateways repair it by themselves; to do it now: loramux sweep"
        return Check("index", "warn", f"{len(behind)} of {len(listed)} rows are behind: {_some(behind)}", hint)
    return Check("index", "ok", f"true for all {len(listed)} adapters")


async def check_bases(patient: Patient) -> Check:
    for base in await patient.registry.bases():
        patient.contracts[base] = await patient.registry.base(base)
    unknown = sorted({entry.base for entry in patient.entries} - patient.contracts.keys())
    if unknown:
        hint = "serve the base once, or `loramux base-contract SOURCE --id BASE --publish`"
        return Check("base contracts", "warn", f"adapters of {_some(unknown)} were only checked for structure", hint)
    if not patient.contracts:
        return Check("base contracts", "warn", "no base has reported yet", "start a gateway: loramux up")
    return Check("base contracts", "ok", f"{len(patient.contracts)}: {_some(sorted(patient.contracts))}")


async def check_fingerprints(patient: Patient) -> Check:
    """Of what aliases name: the rest answers nobody who doesn't ask for it by number."""
    from adapters.registry.fingerprints import changed

    manifests = await _named_manifests(patient)
    stale = [str(found.ref) for contract in patient.contracts.values() for found in changed(contract, manifests)]
    if stale:
        hint = "loramux probe REF shows what they say now; train and publish them anew if it is wrong"
        return Check(
            "changed bases",
            "warn",
            f"{len(stale)} versions were checked against another state of their base: {_some(stale)}",
            hint,
        )
    return Check("changed bases", "ok", f"{len(manifests)} versions under aliases fit their base as it is")


async def check_limits(patient: Patient) -> Check:
    over = [
        f"{entry.base}:{entry.name}@{number} (rank {version.rank}, limit {patient.contracts[entry.base].max_rank})"
        for entry in patient.entries
        if entry.base in patient.contracts
        for number, version in entry.versions.items()
        if not version.retired and version.rank > patient.contracts[entry.base].max_rank
    ]
    if over:
        return Check(
            "engine limits", "fail", f"{len(over)} versions can't load: {_some(over)}", "raise `max_lora_rank`, or retire them"
        )
    return Check("engine limits", "ok", "no version is over its base's largest rank")


async def check_gateway(patient: Patient) -> Check:
    url = patient.gateway.url
    try:
        await asyncio.to_thread(patient.gateway.get, "/healthz")
        patient.gateway_answers = True
        ready = await asyncio.to_thread(patient.gateway.readiness)
    except EngineUnavailable as error:
        if error.reason != "gateway_unreachable":
            raise
        return Check(
            "gateway", "fail" if patient.gateway_was_named else "warn", f"none answers at {url}", "loramux up, or --gateway"
        )
    if ready.get("status") != "ok":
        missing = ", ".join(name for name in ("registry", "bases") if not ready.get(name))
        return Check("gateway", "warn", f"{url} is not ready: {missing or 'it does not say why'}", "wait, or see its log")
    age = ready.get("registry_age_s")
    if ready.get("registry_error"):
        return Check(
            "gateway", "warn", f"{url}: its last look at the registry failed ({ready['registry_error']})", "see the store above"
        )
    return Check("gateway", "ok", f"{url} is ready" + (f", its picture is {age:.1f} s old" if age is not None else ""))


async def check_port(patient: Patient) -> Check:
    parts = urlsplit(patient.gateway.url)
    port = parts.port or 80
    if patient.gateway_answers:
        return Check("port", "ok", f"{port} is the gateway's")
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return Check("port", "skip", "the gateway is on another machine")
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            return Check("port", "fail", f"{port} is somebody else's", "end what has it, or set LORAMUX_GATEWAY__PORT")
    return Check("port", "ok", f"{port} is free")


CHECKS: tuple[tuple[str, bool, Callable[[Patient], Awaitable[Check]]], ...] = (
    ("settings", False, check_settings),
    ("store", True, check_store),
    ("conditional writes", True, check_conditions),
    ("clock", True, check_clock),
    ("index", True, check_index),
    ("base contracts", True, check_bases),
    ("changed bases", True, check_fingerprints),
    ("engine limits", True, check_limits),
    ("node cache", False, check_disk),
    ("gateway", False, check_gateway),
    ("port", False, check_port),
)


async def _named_manifests(patient: Patient) -> list[Manifest]:
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def read(ref: AdapterRef) -> Manifest:
        async with gate:
            return await patient.registry.manifest(ref)

    refs = {
        AdapterRef(entry.base, entry.name, version)
        for entry in patient.entries
        for version in {*entry.aliases.values(), *(number for weights in entry.weights.values() for number in weights)}
    }
    return list(await asyncio.gather(*map(read, sorted(refs))))


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
