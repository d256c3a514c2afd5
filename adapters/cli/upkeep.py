"""Commands for those who keep a registry: doctor, whoami, refresh, gc, adopt, backup, restore-backup, sweep, upgrade."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from adapters.cli.gateway import answering, find_gateway, named_gateway
from adapters.cli.options import AsJson, Base, Config, Gateway, Message, Yes
from adapters.cli.output import Line, as_data, count_bar, fail, progress_bar, show, size, spinner, table, warn
from adapters.cli.program import UPKEEP, app
from adapters.cli.telling import tell
from adapters.cli.times import duration_s
from adapters.cli.work import by, find_base, run, usage, who
from adapters.errors import LoraMuxError, StoreError
from adapters.names import PRODUCTION, AdapterRef, check_adapter_name
from adapters.settings import StoreSettings, read_registry_settings

MARKS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
BACKUP_KEY_VARIABLE, BACKUP_SECRET_VARIABLE = "LORAMUX_BACKUP_ACCESS_KEY_ID", "LORAMUX_BACKUP_SECRET_ACCESS_KEY"


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux doctor --gateway http://127.0.0.1:8000")
def doctor(gateway: Gateway = None, config: Config = None, as_json: AsJson = False) -> None:
    """Check settings, store, index, adapters, disk and gateway, and propose repairs. Exit code 1 if a check failed."""
    from adapters.cli.doctor import Patient, examine

    patient = Patient(config, find_gateway(gateway, config, 5), named_gateway(gateway) is not None)
    checks = asyncio.run(examine(patient))
    lines: list[Line] = []
    for check in checks:
        lines.append(Text.assemble((f"{check.status:5}", MARKS[check.status]), f"{check.name}: {check.message}"))
        lines += [f"      {check.hint}"] if check.hint else []
    counts = {status: sum(check.status == status for check in checks) for status in MARKS}
    lines.append(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
    show(as_json, {"checks": [asdict(check) for check in checks], "failed": counts["fail"], "warned": counts["warn"]}, *lines)
    sys.exit(1 if counts["fail"] else 0)


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux whoami")
def whoami(gateway: Gateway = None, config: Config = None, as_json: AsJson = False) -> None:
    """Which registry and which gateway commands would work on, and as whom."""

    async def work(registry: Any) -> list[str] | None:
        try:
            return await registry.bases()
        except StoreError as error:
            warn(error.message)
            return None

    settings = _settings(config, as_json)
    bases = run(config, work, as_json)
    door = find_gateway(gateway, config, 3)
    try:
        generation = door.readiness().get("registry_generation")
    except LoraMuxError as error:
        generation = None
        if named_gateway(gateway):
            warn(error.message)
    data = {"who": who(), "registry": settings.url, "endpoint": settings.endpoint, "bases": bases}
    data |= {"gateway": door.url, "gateway_answers": generation is not None, "generation": generation}
    answer = f"answers, generation {generation}" if generation is not None else "does not answer"
    facts = {
        "who": data["who"],
        "registry": settings.url + (f"  at {settings.endpoint}" if settings.endpoint else ""),
        "bases": "the store does not answer" if bases is None else ", ".join(bases) or "none yet",
        "gateway": f"{door.url}  {answer}",
    }
    show(as_json, data, *(f"{what:10}{text}" for what, text in facts.items()))


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux refresh --gateway http://127.0.0.1:8000")
def refresh(gateway: Gateway = None, config: Config = None, as_json: AsJson = False) -> None:
    """Make a gateway look at the registry now instead of within a second."""
    door = find_gateway(gateway, config, 30)
    try:
        generation = door.post("/registry/v1/refresh", {})["generation"]
    except LoraMuxError as error:
        fail(error, as_json)
    show(as_json, {"gateway": door.url, "generation": generation}, f"{door.url} has looked: generation {generation}")


# Collection


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux gc --keep-last 5 --keep-younger 30d --yes")
def gc(
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep that many of the newest versions of each adapter.")] = None,
    keep_younger: Annotated[str | None, typer.Option(help="Keep what was published since: `30d`, `12h`.")] = None,
    keep_tag: Annotated[list[str] | None, typer.Option("--keep-tag", help="Keep versions with this tag.")] = None,
    grace: Annotated[str, typer.Option(help="Files go when their version has been given up for so long.")] = "24h",
    message: Message = None,
    yes: Yes = False,
    gateway: Gateway = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Give up old versions by policy and delete files that nobody needs. Without --yes it only shows the plan."""
    from adapters.registry import collection, retention

    younger_s = usage(lambda: duration_s(keep_younger)) if keep_younger else None
    policy = retention.RetentionPolicy(keep_last, younger_s, tuple(keep_tag or ()), usage(lambda: duration_s(grace)))
    tiers = answering(gateway, config, as_json)
    in_use = [AdapterRef.parse(ref) for ref, tier in (tiers or {}).items() if tier == "engine"]

    async def work(registry: Any) -> tuple[Any, Any]:
        plan = await collection.plan_for(registry, policy, in_use=in_use)
        if not yes:
            return plan, None
        with count_bar("collecting", not as_json) as progress:
            return plan, await collection.run(registry, plan, by(message), progress=progress)

    plan, report = run(config, work, as_json)
    data = _plan_data(plan) | {"done": report is not None, "gateway_asked": tiers is not None}
    data |= {"bytes_freed": report.bytes_freed if report else 0, "spared": [list(one) for one in report.spared] if report else []}
    show(as_json, data, *_plan_lines(plan, report, tiers is not None))


def _plan_data(plan: Any) -> dict[str, Any]:
    return {
        "collect": [str(ref) for ref in plan.collect],
        "kept": [{"ref": str(kept.ref), "why": list(kept.why), "size_bytes": kept.size_bytes} for kept in plan.kept],
        "files": [{"key": blob.key, "size_bytes": blob.size_bytes, "why": blob.why} for blob in plan.blobs],
        "waiting": [
            {"key": blob.key, "size_bytes": blob.size_bytes, "why": blob.why, "due_s": blob.due_s} for blob in plan.waiting
        ],
        "unknown": list(plan.unknown),
        "bytes_now": plan.bytes_now,
        "bytes_later": plan.bytes_later,
    }


def _plan_lines(plan: Any, report: Any, gateway_asked: bool) -> list[Line | None]:
    whys: dict[str, int] = {}
    for kept in plan.kept:
        whys[kept.why[0].partition(":")[0]] = whys.get(kept.why[0].partition(":")[0], 0) + 1
    kept_text = ", ".join(f"{count} {why}" for why, count in sorted(whys.items()))
    asked = "" if gateway_asked else "  (no gateway answered; what is in use was not asked)"
    lines: list[Line | None] = [
        f"versions: {len(plan.collect)} to give up, {len(plan.kept)} kept" + (f" ({kept_text})" if kept_text else "") + asked,
        *(f"  {ref}" for ref in plan.collect),
        f"files: {len(plan.blobs)} to delete now ({size(plan.bytes_now)}), {len(plan.waiting)} later ({size(plan.bytes_later)})",
        f"unknown keys, left alone: {len(plan.unknown)}" if plan.unknown else None,
    ]
    if report is not None:
        done = f"collected: {len(report.collected)} versions, {len(report.deleted)} files, {size(report.bytes_freed)} freed"
        return [*lines, done, *(f"  spared {what}: {why}" for what, why in report.spared)]
    return [*lines, "nothing to do" if plan.is_empty else "nothing was changed; next: the same command with --yes"]


# Adoption


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux adopt s3://bucket/adapters --base demo --dry-run")
def adopt(
    source: Annotated[str, typer.Argument(help="`s3://bucket/prefix`, or a folder: one adapter, or many below it.")],
    base: Base = None,
    name: Annotated[str | None, typer.Option(help="Adapter name, where one adapter lies there; its folder's by default.")] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Let the alias name the last step of each.")] = False,
    alias: Annotated[str, typer.Option(help="Alias that --promote moves.")] = PRODUCTION,
    settle: Annotated[str, typer.Option(help="Leave alone what changed within that time.")] = "10s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what lies there.")] = False,
    message: Message = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Publish what lies in plain PEFT folders of a store, as `aws s3 sync` or a trainer left it."""
    from adapters.adoption import Adoption, adopt, find, source_settings
    from adapters.store import open_store

    settle_s = usage(lambda: duration_s(settle))
    address = source if "://" in source else Path(source).absolute().as_uri()

    async def work(registry: Any) -> list[dict[str, Any]]:
        where = open_store(source_settings(address, read_registry_settings(config)))
        base_id = await find_base(registry, base)
        with spinner("looking twice", not as_json):
            found = await find(where, default_name=name or address.rstrip("/").rpartition("/")[2], settle_s=settle_s)
        if name is not None:
            _check_one(found, name)
        rows = []
        for candidate in found:
            adoption = Adoption(
                base_id,
                name or candidate.name,
                candidate.prefix,
                step=candidate.step,
                original=candidate.original,
                address=address,
                promote=alias if promote else None,
                by=by(message),
            )
            rows.append(_candidate_data(candidate, adoption.name))
            if candidate.is_ready and not dry_run:
                before = await _head(registry, adoption)
                rows[-1] |= await _adopted(registry, where, adoption, adopt, not as_json)
                await tell(config, before, await _head(registry, adoption))
        return rows

    rows = run(config, work, as_json)
    show(as_json, {"source": address, "found": rows}, *_adoption_lines(rows, dry_run))
    sys.exit(1 if any(row["error"] for row in rows) else 0)


def _check_one(found: Any, name: str) -> None:
    check_adapter_name(name)
    names = sorted({candidate.original for candidate in found})
    if len(names) > 1:
        raise typer.BadParameter(f"--name is for one adapter; there are {len(names)}: {', '.join(names[:5])}")


def _candidate_data(candidate: Any, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "prefix": candidate.prefix,
        "step": candidate.step,
        "size_bytes": candidate.size_bytes,
        "ready": candidate.is_ready,
        "reason": candidate.reason,
        "ref": None,
        "created": None,
        "error": None,
    }


async def _adopted(registry: Any, where: Any, adoption: Any, adopt: Any, bar: bool) -> dict[str, Any]:
    """One folder that is refused doesn't hold up the others."""
    try:
        with progress_bar(adoption.name, bar) as progress:
            published = await adopt(registry, where, adoption, progress)
    except LoraMuxError as error:
        return {"error": as_data(error)}
    return {"ref": str(published.ref), "created": published.created}


async def _head(registry: Any, adoption: Any) -> Any:
    head, _ = await registry.truth.head(adoption.base, adoption.name)
    return head


def _adoption_lines(rows: list[dict[str, Any]], dry_run: bool) -> list[Line]:
    if not rows:
        return ["no adapter lies there; adapter_config.json and adapter_model.safetensors are looked for"]
    cells = [(row["prefix"] or ".", row["name"], str(row["step"] or "-"), size(row["size_bytes"]), _outcome(row)) for row in rows]
    lines: list[Line] = list(table(["FOLDER", "NAME", "STEP", "SIZE", "OUTCOME"], cells))
    if dry_run:
        return [*lines, "nothing was published; next: the same command without --dry-run"]
    names = sorted({row["ref"].rpartition("@")[0] for row in rows if row["ref"]})
    return [*lines, *(f"next: loramux show {adapter}" for adapter in names[:3])]


def _outcome(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"refused: {row['error']['reason'] or row['error']['code']}: {row['error']['message']}"
    if row["ref"]:
        return f"{'published' if row['created'] else 'there already'}: {row['ref']}"
    return "ready" if row["ready"] else f"left alone: {row['reason']}"


# Copies


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux backup s3://other-bucket/registry")
def backup(
    url: Annotated[str, typer.Argument(help="Where to: `s3://bucket/prefix` or `file:///dir`.")],
    endpoint: Annotated[str | None, typer.Option(help="Endpoint there; the registry's by default, `aws` for AWS itself.")] = None,
    region: Annotated[str | None, typer.Option(help="Region there; the registry's by default.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read and hash files that are there already.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Copy the whole registry into another store. What is there already is not copied again."""
    _copy(url, endpoint, region, verify, config, as_json, back=False)


@app.command("restore-backup", rich_help_panel=UPKEEP, epilog="Example: loramux restore-backup s3://other-bucket/registry")
def restore_backup(
    url: Annotated[str, typer.Argument(help="Where the backup lies.")],
    endpoint: Annotated[str | None, typer.Option(help="Endpoint there; the registry's by default, `aws` for AWS itself.")] = None,
    region: Annotated[str | None, typer.Option(help="Region there; the registry's by default.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read and hash files that are here already.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Copy a backup into the registry. Nothing newer in the registry is overwritten."""
    _copy(url, endpoint, region, verify, config, as_json, back=True)


def _copy(
    url: str, endpoint: str | None, region: str | None, verify: bool, config: Path | None, as_json: bool, *, back: bool
) -> None:
    from adapters.registry.copying import copy
    from adapters.store import open_store

    async def work(registry: Any) -> Any:
        other = open_store(other_store(url, endpoint, region, read_registry_settings(config)))
        source, target = (other, registry.store) if back else (registry.store, other)
        with count_bar("copying", not as_json) as progress:
            return await copy(source, target, progress, verify=verify)

    report = run(config, work, as_json)
    data = asdict(report) | {"damaged": [str(ref) for ref in report.damaged], "heads_newer": list(report.heads_newer)}
    data.pop("index")
    verb, place = ("restored", "from") if back else ("copied", "to")
    lines: list[Line] = [
        f"{verb}: {report.versions_copied} of {report.versions} versions of {report.adapters} adapters, "
        f"{report.files_copied} files ({size(report.bytes_copied)}), {report.bases_copied} bases, {place} {url}"
    ]
    lines += [f"warning: newer there, left as it is: {adapter}" for adapter in report.heads_newer]
    lines += [f"warning: damaged in the source: {ref}" for ref in report.damaged]
    lines.append("next: loramux list" if back else f"the way back: loramux restore-backup {url}")
    show(as_json, data, *lines)
    sys.exit(1 if report.damaged else 0)


def other_store(url: str, endpoint: str | None, region: str | None, registry: StoreSettings) -> StoreSettings:
    """Another store, reached as the registry's unless something else is said. Raises InvalidRequest."""
    from adapters.adoption import source_settings

    said: dict[str, Any] = {"endpoint": None if endpoint == "aws" else endpoint, "region": region}
    said = {key: value for key, value in said.items() if value is not None or (key == "endpoint" and endpoint == "aws")}
    if os.environ.get(BACKUP_KEY_VARIABLE):
        keys = {"access_key_id": os.environ[BACKUP_KEY_VARIABLE], "secret_access_key": os.environ.get(BACKUP_SECRET_VARIABLE)}
        said |= keys
    settings = source_settings(url, registry)
    return StoreSettings.model_validate({name: getattr(settings, name) for name in StoreSettings.model_fields} | said)


# Repair


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux sweep --full")
def sweep(
    full: Annotated[bool, typer.Option("--full", help="Read every manifest and head, instead of believing one listing.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Compare the index with the truth, and repair it."""
    report = run(config, lambda registry: registry.sweep(full=full), as_json)
    data = {
        "adapters": report.adapters,
        "versions": report.versions,
        "repaired": list(report.repaired),
        "shards_written": report.shards_written,
    }
    text = f"swept: {report.adapters} adapters, {report.versions} versions; {len(report.repaired)} rows repaired"
    show(as_json, data, text, *(f"  {adapter}" for adapter in report.repaired))


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux upgrade")
def upgrade(config: Config = None, as_json: AsJson = False) -> None:
    """Rewrite documents of an older schema. Upgrade all gateways before: older ones can't read what it writes."""
    from adapters.registry.upgrading import upgrade as upgrade_registry

    report = run(config, upgrade_registry, as_json)
    text = (
        f"upgraded to schema {report.schema_version}: {report.heads_rewritten} of {report.heads} heads, "
        f"{report.bases_rewritten} of {report.bases} bases, {report.shards_rewritten} index shards"
    )
    show(as_json, asdict(report), text)


def _settings(config: Path | None, as_json: bool) -> Any:
    try:
        return read_registry_settings(config)
    except LoraMuxError as error:
        fail(error, as_json)
