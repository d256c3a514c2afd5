"""`loramux train publish`: exports of a run that somebody else started become versions, once or for as long as it runs."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from adapters.cli.options import AsJson, Config
from adapters.cli.output import err, fail, show, visible, warn
from adapters.cli.work import usage
from adapters.errors import LoraMuxError, ModelNotFound

EXAMPLE = "Example: loramux train publish exports --base maze --name maze-grpo --watch"


def publish(
    export_path: Annotated[Path, typer.Argument(help="Folder that holds global_step_N/policy.")],
    base: Annotated[str, typer.Option(help="Base id of the adapter.")],
    name: Annotated[str, typer.Option(help="Adapter: `name` or `team/name`.")],
    run: Annotated[str | None, typer.Option(help="Name of the run; the folder's by default.")] = None,
    alias: Annotated[str | None, typer.Option(help="Alias that moves to what passes the gate; none moves none.")] = None,
    metric: Annotated[str, typer.Option(help="What the gate looks at.")] = "eval/easy-64/sampled/solve_rate",
    min_solve_rate: Annotated[float, typer.Option(min=0, max=1, help="Least share of it that passes.")] = 0.0,
    watch: Annotated[bool, typer.Option("--watch", help="Go on looking until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, help="How often --watch looks.")] = 10.0,
    settle_s: Annotated[float, typer.Option("--settle-s", min=0, help="--watch waits until nothing changed for so long.")] = 10.0,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, help="Limit for what is not published at the end.")] = 300.0,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Publish the exports of a run as versions, those that are none yet."""
    from adapters.registry import Registry
    from adapters.settings import read_registry_settings
    from adapters.store import open_store
    from training.publishing import Gate, Origin, Publisher, Target, code_revision

    target = usage(lambda: Target(base, name, alias, Gate(metric, min_solve_rate)))
    try:
        settings = read_registry_settings(config)
        if not watch and not export_path.is_dir():
            raise ModelNotFound("there is no such folder", value=str(export_path), param="export_path")
    except LoraMuxError as error:
        fail(error, as_json)
    told: list[Any] = []

    def tell(event: Any) -> None:
        told.append(event)
        if not as_json and (line := _line(event)):
            err.print(visible(line))

    origin = Origin(run or export_path.absolute().name, code_revision=code_revision(export_path.absolute()))
    publisher = Publisher(lambda: Registry(open_store(settings)), target, origin, tell)
    if watch:
        _until_interrupted(publisher, export_path, interval_s, settle_s)
    else:
        publisher.scan(export_path)
    left = publisher.close(timeout_s)
    rows = [{"event": type(event).__name__, **asdict(event)} for event in told]
    refused = [row for row in rows if row["event"] == "PublishRefused"]
    versions = [row["ref"] for row in rows if row["event"] == "Published"]
    show(
        as_json,
        {"events": rows, "versions": versions, "unpublished": [asdict(one) for one in left]},
        f"versions: {', '.join(versions) or 'none'}",
        f"next: loramux show {base}:{name}" if versions else None,
    )
    if left or refused:
        raise typer.Exit(1)


def _until_interrupted(publisher: Any, export_path: Path, interval_s: float, settle_s: float) -> None:
    publisher.watch(export_path, interval_s=interval_s, settle_s=settle_s)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        warn("ending; what is on its way is finished first")


def _line(event: Any) -> str | None:
    kind = type(event).__name__
    if kind == "Published":
        return f"step {event.step}: {event.ref}{'' if event.created else ' (there already)'}"
    if kind == "Judged":
        said = f"{event.alias} moved to it" if event.promoted else f"{event.alias} stays: {'; '.join(event.reasons)}"
        return f"step {event.step}: {said}"
    if kind == "PublishTrouble":
        return f"step {event.step}: {event.error} ({event.reason}); it is tried again"
    if kind == "PublishRefused":
        return f"step {event.step}: refused ({event.reason}): {event.error}"
    return f"step {event.step}: not published: {event.reason}" if kind == "Unpublished" else None
