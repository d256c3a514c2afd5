"""`loramux bench plan`: asks the registry and the simulation by their commands, and shows what `planning` makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from loadtests.planning import Plan, Step, Times, Wish

MIB, GIB, MB = 2**20, 2**30, 1e6
UNITS = {"GiB": GIB, "MiB": MIB, "KiB": 2**10}
LORAMUX = Path(sys.executable).with_name("loramux")
EXAMPLE = "Example: loramux bench plan --rate 20 --requests-per-replica-s 10"


def plan(  # noqa: PLR0913, PLR0917 (a command has as many parameters as it has options)
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, all replicas together.")],
    requests_per_replica_s: Annotated[float, typer.Option(min=0.001, help="Requests a second that one replica carries.")],
    adapters: Annotated[int | None, typer.Option(min=1, max=100_000, help="So many adapters, in place of a registry's.")] = None,
    size_mib: Annotated[float, typer.Option(min=0.001, help="MiB of each, with --adapters.")] = 175,
    base: Annotated[str | None, typer.Option(help="Only this base's adapters, of a registry with several.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file with the registry; loramux.yaml by default.")] = None,
    alpha: Annotated[float, typer.Option(min=0, max=5, help="The k-th busiest adapter gets 1 / k^alpha of the traffic.")] = 1.0,
    usage: Annotated[Path | None, typer.Option(help="JSON: requests by name of adapter, in place of --alpha.")] = None,
    answer_s: Annotated[float, typer.Option(min=0.001, help="Seconds that an answer takes, on average.")] = 2.0,
    cold: Annotated[float, typer.Option(help="% of answers that may not find their adapter in the engine.")] = 5.0,
    store: Annotated[float, typer.Option(help="% of answers that may wait for the store.")] = 0.5,
    max_slots: Annotated[int, typer.Option(min=1, max=4096, help="Most slots of a replica.")] = 256,
    max_replicas: Annotated[int | None, typer.Option(min=1, max=1000, help="Most replicas.")] = None,
    memory_gib: Annotated[float | None, typer.Option(min=0.001, help="Most host memory for a replica's adapters.")] = None,
    replicas_per_node: Annotated[int, typer.Option(min=1, max=64, help="Replicas that share a node's disk.")] = 1,
    room: Annotated[int, typer.Option(min=1, help="bases[].room: requests at once from which a replica is full.")] = 64,
    fetch_mb_per_s: Annotated[float, typer.Option(min=0.001, help="MB/s of a fetch from the store.")] = 500,
    load_mb_per_s: Annotated[float, typer.Option(min=0.001, help="MB/s of a load from disk into the engine.")] = 700,
    measured: Annotated[Path | None, typer.Option(help="A run's folder or summary.json, to take times from; gives TTFT.")] = None,
    requests: Annotated[int, typer.Option(min=100, max=1_000_000, help="Requests in each simulated run.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Where all dice begin.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How many slots, replicas and GiB of disk, and what cold rate to expect: production's decisions on made-up traffic.

    Adapters and their sizes come from the registry (production versions, else the newest), unless --adapters says how many.
    """
    from loadtests import planning

    if adapters is not None and (config or base or usage):
        raise typer.BadParameter("--adapters is for adapters that are not there yet: without --config, --base and --usage")
    sizes = {str(number): int(size_mib * MIB) for number in range(adapters)} if adapters else listed(config, base, as_json)
    wish = planning.Wish(
        sizes_bytes=tuple(sizes.values()),
        rate_per_s=rate,
        requests_per_replica_s=requests_per_replica_s,
        alpha=alpha,
        weights=weights_of(usage, sizes, as_json) if usage else None,
        answer_s=answer_s,
        cold_aim=cold / 100,
        store_aim=store / 100,
        max_slots=max_slots,
        max_replicas=max_replicas,
        memory_bytes=int(memory_gib * GIB) if memory_gib else None,
        replicas_per_node=replicas_per_node,
        room=room,
        times=_times(measured, fetch_mb_per_s, load_mb_per_s, as_json),
        requests=requests,
        seed=seed,
    )
    try:
        with _patience():
            made = planning.plan(wish, lambda asked: [planning.Case.of(answer) for answer in answers(asked, as_json)])
    except planning.BadWish as error:
        _fail(str(error), as_json)
    _show(made, wish, as_json)
    if not made.met:
        sys.exit(1)


# -- commands of others ------------------------------------------------------------------------------------------------


def listed(config: Path | None, base: str | None, as_json: bool) -> dict[str, int]:
    """Bytes of each adapter's production version, else of its newest, by `loramux list`."""
    words = [*(["--config", str(config)] if config else []), *(["--base", base] if base else [])]
    there = json.loads(_output([str(LORAMUX), "list", "--json", *words], None, "loramux list", as_json))["adapters"]
    bases = {adapter["base"] for adapter in there}
    if len(bases) > 1:
        _fail(f"the registry has adapters of {len(bases)} bases ({', '.join(sorted(bases))}): choose one with --base", as_json)
    if not there:
        _fail("the registry has no adapters: say how many there will be with --adapters and --size-mib", as_json)
    return {adapter["name"]: served_bytes(adapter) for adapter in there}


def served_bytes(adapter: dict[str, Any]) -> int:
    by_version = {version["version"]: version["size_bytes"] for version in adapter["versions"]}
    return by_version.get(adapter["production"]) or by_version[max(by_version)]


def weights_of(usage: Path, sizes: dict[str, int], as_json: bool) -> tuple[float, ...]:
    """Each adapter's requests; one that the file does not name has none."""
    try:
        counted = json.loads(usage.read_text())
        weights = tuple(float(counted.get(name, 0)) for name in sizes)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _fail(f"{usage} is no JSON mapping of names to numbers: {error}", as_json)
    if min(weights) < 0 or not sum(weights):
        known = sum(name in sizes for name in counted)
        _fail(f"{usage} names {known} of the registry's {len(sizes)} adapters; their requests sum to {sum(weights):g}", as_json)
    return weights


def answers(question: dict[str, Any], as_json: bool = False) -> list[dict[str, Any]]:
    """What the simulation expects of each combination, as it says it."""
    command = [sys.executable, "-m", "serve_app.simulation", "plan", "--json"]
    return json.loads(_output(command, json.dumps(question), "the simulation", as_json))["cases"]


def _output(command: list[str], said: str | None, who: str, as_json: bool) -> str:
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        _fail(f"{who}: {_message(done.stderr)}", as_json)
    return done.stdout


def _message(stderr: str) -> str:
    """Of the error that a command printed as JSON, else its last words."""
    try:
        return json.loads(stderr.strip().splitlines()[-1])["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return stderr.strip()[-500:]


def _times(measured: Path | None, fetch_mb_per_s: float, load_mb_per_s: float, as_json: bool) -> Times:
    from loadtests.planning import Times

    if measured is None:
        return Times(fetch_bytes_per_s=fetch_mb_per_s * MB, load_bytes_per_s=load_mb_per_s * MB)
    from loadtests.analysis import load_summary
    from loadtests.stage_times import NotMeasured, times_of

    try:
        return times_of(load_summary(measured))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{measured} is no run: {error}") from error
    except NotMeasured as error:
        _fail(f"{measured}: {error}", as_json)


def _patience() -> AbstractContextManager[Any]:
    """A sign of life for a minute of simulating, where somebody looks."""
    from rich.console import Console

    return Console(stderr=True).status("simulating")


# -- telling -----------------------------------------------------------------------------------------------------------


def _show(made: Plan, wish: Wish, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(made.document()) + "\n")
        return
    from rich.console import Console

    out = Console(highlight=False, markup=False, soft_wrap=True)
    out.print(_plan_table(made, wish))
    out.print(_steps_table(made))
    for note in made.notes:
        out.print(f"note: {note}", style="yellow")
    out.print("It assumes that")
    for line in made.assumptions:
        out.print(f"  - {line}")
    out.print(f"next: set engine.max_cpu_loras: {made.slots}, replicas: {made.replicas}, cache.budget_bytes: {made.disk_bytes}")


def _plan_table(made: Plan, wish: Wish) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    case = made.expected
    table = Table(
        title=f"{len(wish.sizes_bytes):,} adapters, {size(sum(wish.sizes_bytes))}, {wish.rate_per_s:g} requests/s", box=SIMPLE
    )
    table.add_column("plan")
    table.add_column("", justify="right")
    for name, value in (
        ("replicas", f"{made.replicas}"),
        ("slots of each (max_cpu_loras)", f"{made.slots}"),
        ("host memory of each for them", size(made.memory_bytes)),
        ("and while loading, at most", size(made.staged_bytes)),
        ("nodes", f"{made.nodes}"),
        ("disk of each (cache.budget_bytes)", size(made.disk_bytes)),
        (
            "answers by tier: engine / disk / remote",
            " / ".join(percent(case.tiers[tier]) for tier in ("engine", "disk", "remote")),
        ),
        ("cold answers", f"{percent(case.cold_share)} (aim {percent(wish.cold_aim)})"),
        ("answers from the store", f"{percent(case.tiers['remote'])} (aim {percent(wish.store_aim)})"),
        ("loads", f"{case.loads_per_s:.2f}/s"),
        ("fetches", f"{case.fetches_per_s:.3f}/s, {case.fetched_bytes_per_s / MB:.1f} MB/s"),
        ("busiest replica", f"{percent(case.busiest_share)} of requests"),
        ("wait for a cold one, p50 / p95", spread(case.cold_wait_s, "s")),
        *([("TTFT, p50 / p95", spread(case.ttft_ms, "ms"))] if case.ttft_ms else []),
    ):
        table.add_row(name, value)
    return table


def _steps_table(made: Plan) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title="One step less or more (memory and disk of all replicas and nodes)", box=SIMPLE)
    columns = ("", "replicas", "slots", "cold", "store", "memory", "disk")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    case = made.expected
    cold, store = percent(case.cold_share), percent(case.tiers["remote"])
    table.add_row("the plan", str(made.replicas), str(made.slots), cold, store, "", "")
    for step in made.steps:
        table.add_row(*_step_cells(step))
    return table


def _step_cells(step: Step) -> tuple[str, ...]:
    case = step.case
    return (
        step.what,
        str(case.replicas),
        str(case.slots),
        percent(case.cold_share),
        percent(case.tiers["remote"]),
        size(step.memory_by_bytes, "+"),
        size(step.disk_by_bytes, "+"),
    )


def size(size_bytes: float, sign: str = "") -> str:
    """In the largest unit of which there is one at least; `sign` is `+` for differences."""
    if not size_bytes:
        return "0"
    unit = next((unit for unit in UNITS if abs(size_bytes) >= UNITS[unit]), "KiB")
    return f"{size_bytes / UNITS[unit]:{sign}.1f} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def spread(quantiles: dict[str, float] | None, unit: str) -> str:
    if quantiles is None:
        return "-"
    digits = 2 if unit == "s" else 0
    return f"{quantiles['p50']:.{digits}f} / {quantiles['p95']:.{digits}f} {unit}"


def _fail(text: str, as_json: bool) -> NoReturn:
    sys.stderr.write(json.dumps({"error": {"message": text}}) + "\n" if as_json else f"{text}\n")
    sys.exit(1)
