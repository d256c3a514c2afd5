"""Commands about one version: retire, restore, tag, pull, diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from adapters.cli import shapes
from adapters.cli.options import AsJson, Base, Config, IfRevision, Message, Ref
from adapters.cli.output import Line, progress_bar, show, size, table
from adapters.cli.program import VERSIONS, app
from adapters.cli.telling import changing
from adapters.cli.work import by, find_ref, run
from adapters.names import AdapterRef
from adapters.types import Head, Manifest


@app.command(rich_help_panel=VERSIONS, epilog="Example: loramux retire parrot@1 -m 'wrong data'")
def retire(
    ref: Ref,
    message: Message = None,
    if_revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Take a version out of service; it can come back."""
    found, before, head = _changed(
        ref, base, config, as_json, lambda registry, ref: registry.retire(ref, by(message, if_revision))
    )
    verb = "retired" if before.revision != head.revision else "unchanged: retired already"
    show(as_json, _data(found, before, head), f"{verb}: {found} (revision {head.revision})", f"undo: loramux restore {found}")


@app.command(rich_help_panel=VERSIONS, epilog="Example: loramux restore parrot@1")
def restore(
    ref: Ref,
    message: Message = None,
    if_revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Bring a retired version back."""
    found, before, head = _changed(
        ref, base, config, as_json, lambda registry, ref: registry.restore(ref, by(message, if_revision))
    )
    verb = "restored" if before.revision != head.revision else "unchanged: in service already"
    following = f"next: loramux promote {found.base}:{found.name} {found.version}"
    show(as_json, _data(found, before, head), f"{verb}: {found} (revision {head.revision})", following)


@app.command(rich_help_panel=VERSIONS, epilog="Example: loramux tag parrot@2 dataset=birds-v3 draft-")
def tag(
    ref: Ref,
    tags: Annotated[list[str], typer.Argument(metavar="K=V|K-...", help="`k=v` sets a tag, `k-` takes it away.")],
    if_revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Write words on a version, or wipe them off."""
    wanted = parse_tags(tags)
    found, before, head = _changed(
        ref, base, config, as_json, lambda registry, ref: registry.tag(ref, wanted, by(None, if_revision))
    )
    now = head.tags.get(found.version, {})
    words = "  ".join(f"{key}={value}" for key, value in now.items()) or "no tags"
    following = f"see: loramux list --tag {next(iter(now))}={next(iter(now.values()))}" if now else None
    show(as_json, _data(found, before, head) | {"tags": now}, f"tagged: {found}  {words}", following)


def parse_tags(words: list[str]) -> dict[str, str | None]:
    tags: dict[str, str | None] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and not word.endswith("-"):
            raise typer.BadParameter(f"`{word}` is neither `k=v` nor `k-`")
        tags[key if equals else word[:-1]] = value if equals else None
    return tags


def _changed(ref: str, base: str | None, config: Path | None, as_json: bool, change: Any) -> tuple[AdapterRef, Head, Head]:
    found: list[AdapterRef] = []

    async def work(registry: Any) -> tuple[Head, Head]:
        found.append(await find_ref(registry, ref, base))
        before = await registry.head(found[0].base, found[0].name)
        return before, await change(registry, found[0])

    before, head = changing(config, work, as_json)
    return found[0], before, head


def _data(ref: AdapterRef, before: Head, head: Head) -> dict[str, Any]:
    state = shapes.state(head, ref.version)
    return shapes.head_data(head) | {
        "ref": str(ref),
        "version": ref.version,
        "state": state,
        "changed": before.revision != head.revision,
    }


# The files themselves


@app.command(rich_help_panel=VERSIONS, epilog="Example: loramux pull parrot@2 ./parrot-2")
def pull(
    ref: Ref,
    folder: Annotated[Path | None, typer.Argument(help="Where to; ./NAME-VERSION by default.")] = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Download a version's files, verified by digest: a folder that PEFT loads."""
    from adapters.cli.pulling import pull_version

    async def work(registry: Any) -> tuple[Manifest, Path, bool]:
        manifest = await registry.manifest(await find_ref(registry, ref, base))
        target = folder or Path(f"{manifest.ref.name.replace('/', '-')}-{manifest.ref.version}")
        with progress_bar("pulling", not as_json) as progress:
            return manifest, target, await pull_version(registry.store, manifest, target, progress)

    manifest, target, fetched = run(config, work, as_json)
    data = {"ref": str(manifest.ref), "folder": str(target), "digest": manifest.digest, "size_bytes": manifest.size_bytes}
    verb = "pulled" if fetched else "there already, verified"
    show(
        as_json,
        data | {"fetched": fetched},
        f"{verb}: {manifest.ref} -> {target}  ({size(manifest.size_bytes)}, {manifest.digest[:12]})",
        f"next: PeftModel.from_pretrained(base, {str(target)!r})",
    )


@app.command(rich_help_panel=VERSIONS, epilog="Example: loramux diff parrot@1 parrot@2")
def diff(
    ref: Ref,
    other: Ref,
    limit: Annotated[int, typer.Option(min=0, help="Modules to show, the most changed first; --json has all.")] = 20,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """What changed between two versions: configuration, sizes, metrics, and how far each module moved."""
    from adapters.cli.pulling import pulled
    from adapters.difference import Difference, compare

    async def work(registry: Any) -> tuple[Manifest, Manifest, Difference]:
        first, second = [await registry.manifest(await find_ref(registry, text, base)) for text in (ref, other)]
        with progress_bar("reading", not as_json) as progress:
            async with pulled(registry.store, (first, second), progress) as (left, right):
                return first, second, compare(left, right)

    first, second, difference = run(config, work, as_json)
    facts = {what: (shown(first), shown(second)) for what, shown in FACTS.items()}
    facts |= {
        f"metric {key}": (first.metrics.get(key), second.metrics.get(key)) for key in sorted({*first.metrics, *second.metrics})
    }
    facts |= {f"config {key}": values for key, values in difference.config.items()}
    changed = {what: {"from": old, "to": new} for what, (old, new) in facts.items() if old != new}
    modules = [
        {
            "module": module.name,
            "relative": module.relative,
            "norm": module.norm,
            "from_norm": module.old_norm,
            "to_norm": module.new_norm,
            "only_in": module.only_in,
        }
        for module in difference.modules
    ]
    data = {"from": str(first.ref), "to": str(second.ref), "identical": first.digest == second.digest}
    data |= {"changed": changed, "relative": difference.relative, "modules": modules}
    show(as_json, data, *_diff_lines(first, second, difference, changed, limit))


FACTS = {
    "digest": lambda manifest: manifest.digest[:12],
    "size_bytes": lambda manifest: manifest.size_bytes,
    "rank": lambda manifest: manifest.rank,
    "alpha": lambda manifest: manifest.alpha,
    "num_modules": lambda manifest: manifest.num_modules,
    "modules": lambda manifest: ", ".join(manifest.modules),
    "base_fingerprint": lambda manifest: (manifest.base_fingerprint or "")[:12],
}


def _diff_lines(first: Manifest, second: Manifest, difference: Any, changed: dict[str, Any], limit: int) -> list[Line | None]:
    if first.digest == second.digest:
        return [f"{first.ref} and {second.ref} have the same content ({first.digest[:12]})"]
    rows = [(what, _shown(values["from"]), _shown(values["to"])) for what, values in changed.items()]
    modules = [
        (f"{module.relative:.2%}", f"{module.norm:.4g}", f"{module.old_norm:.4g}", f"{module.new_norm:.4g}", module.name)
        for module in difference.modules[:limit]
    ]
    left = len(difference.modules) - len(modules)
    return [
        *table(["", str(first.ref), str(second.ref)], rows),
        "",
        f"weights moved by {_percent(difference.relative)} of the first one's norm; the most changed modules first:",
        *table(["CHANGE", "NORM OF IT", "NORM 1", "NORM 2", "MODULE"], modules),
        f"{left} more; --limit shows them" if left else None,
    ]


def _percent(relative: float | None) -> str:
    return "infinitely much" if relative is None else f"{relative:.2%}"


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
