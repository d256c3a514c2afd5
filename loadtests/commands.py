"""`loramux bench`: scenarios, comparisons of runs, a gate, reports. What takes time to import is imported where it is used."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from loadtests import plan_command

if TYPE_CHECKING:
    from loadtests.running.tools import Given
    from loadtests.scenario import Scenario

RUNS = Path(".loramux/bench/runs")
DEFAULT = "run"


class ScenarioGroup(TyperGroup):
    """A first word that is no command is a scenario's name or file."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else [DEFAULT, *args])


app = typer.Typer()
bench = typer.Typer(
    cls=ScenarioGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Measure: run a scenario on LoraMux and its peers, compare runs, check a run against a baseline.",
    epilog="Example: loramux bench cold-ladder --peers loramux",
)
app.add_typer(bench, name="bench", rich_help_panel="Run")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bench.command(DEFAULT, epilog="Example: loramux bench run cold-ladder --peers loramux,stock --rounds 3")
def run_scenario(
    scenario: Annotated[str, typer.Argument(help="Name of a scenario (loramux bench list) or a .yaml file.")],
    peers: Annotated[str | None, typer.Option(help="Peers, with commas: vllm, stock, stock-tuned, loramux.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Starts of each peer; every second round backwards.")] = None,
    seed: Annotated[int | None, typer.Option(help="Where all dice begin.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default below .loramux/bench/runs.")] = None,
    url: Annotated[str | None, typer.Option(help="A server that runs already, in place of starting some.")] = None,
    peer: Annotated[Literal["loramux", "stock", "stock-tuned"], typer.Option(help="What answers at --url.")] = "loramux",
    base: Annotated[str | None, typer.Option(help="Folder of another base than the demo's; with --url its id.")] = None,
    adapters: Annotated[Path | None, typer.Option(help="Folder of folders: adapters of that base, to make variants of.")] = None,
    accelerator: Annotated[Literal["cpu", "gpu"], typer.Option(help="What the engines of --base run on.")] = "cpu",
    engine: Annotated[str | None, typer.Option(help="JSON: engine arguments that go over the scenario's.")] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="No proxy before the store: nothing shaped, no fetch counted.")
    ] = False,
    adapters_at: Annotated[str | None, typer.Option(help="s3://bucket/prefix: where stock at --url finds adapters.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a scenario, `bench SCENARIO` for short: start each peer in turn, send the same requests, leave lines and a report."""
    from loadtests import scenario as scenarios

    names = (peer,) if url else tuple(peers.split(",")) if peers else None
    try:
        chosen = scenarios.load(scenario, peers=names, rounds=rounds, seed=seed)
        chosen = chosen.model_copy(update={"engine": chosen.engine | json.loads(engine or "{}")})
    except (scenarios.BadScenario, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    _refuse_if_none_takes_part(chosen)
    if base and not url and not adapters:
        raise typer.BadParameter("--base needs --adapters: variants are made of adapters that fit it")
    from loadtests.running.tools import Given

    folder = out or RUNS / time.strftime(f"{chosen.name}-%Y-%m-%d-%H%M%S")
    _run(chosen, folder, Given(url, base, adapters, accelerator, direct, adapters_at), as_json)


bench.command("plan", epilog=plan_command.EXAMPLE)(plan_command.plan)


@bench.command("list", epilog="Example: loramux bench list")
def list_scenarios(as_json: AsJson = False) -> None:
    """The scenarios that come with LoraMux, and what each is about."""
    from loadtests import scenario as scenarios

    loaded = [scenarios.load(name) for name in scenarios.names()]
    about = [{"name": one.name, "about": one.about, "peers": list(one.peers), "rounds": one.rounds} for one in loaded]
    width = max(len(one.name) for one in loaded)
    _show(as_json, about, *(f"{one.name:{width}}  {one.about}" for one in loaded), "next: loramux bench two-minutes")


@bench.command(epilog="Example: loramux bench compare RUN_A RUN_B")
def compare(
    a: Annotated[Path, typer.Argument(help="Folder or summary.json of a run.")],
    b: Annotated[Path, typer.Argument(help="The run that is held against it.")],
    as_json: AsJson = False,
) -> None:
    """Two runs of one scenario: what differs beyond its noise, and the stage that grew."""
    from loadtests import analysis, report

    try:
        found = analysis.compare(_summary(a), _summary(b))
    except analysis.Incomparable as error:
        _fail(str(error), as_json)
    _show(as_json, found.model_dump(mode="json"), report.compared(found))


@bench.command(epilog="Example: loramux bench check baseline.json --run RUN")
def check(
    baseline: Annotated[Path, typer.Argument(help="File of figures that must hold, with tolerances as ratios.")],
    run: Annotated[Path | None, typer.Option(help="Folder of a run; by default the latest of the baseline's scenario.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the run's figures into the baseline.")] = False,
    as_json: AsJson = False,
) -> None:
    """A gate: exit code 1 if a figure of the run is beyond what the baseline allows."""
    from loadtests import analysis, report

    try:
        kept = analysis.load_baseline(baseline) if baseline.exists() or not write else None
        folder = run or _latest(kept.scenario if kept else "", as_json)
        summary = _summary(folder)
        if write:
            analysis.write_baseline(baseline, analysis.baseline_of(summary, like=kept))
            _show(as_json, {"written": str(baseline)}, f"written: {baseline}", f"next: loramux bench check {baseline}")
            return
        assert kept
        verdicts = analysis.check(kept, summary)
    except analysis.BadBaseline as error:
        _fail(str(error), as_json)
    met = all(verdict.met for verdict in verdicts)
    found = {"run": str(folder), "met": met, "figures": [verdict.model_dump(mode="json") for verdict in verdicts]}
    _show(as_json, found, report.checked(verdicts), f"run: {folder}")
    if not met:
        sys.exit(1)


@bench.command("report", epilog="Example: loramux bench report .loramux/bench/runs/cold-ladder")
def report_again(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    as_json: AsJson = False,
) -> None:
    """Summary and report anew, from the lines that a run left."""
    from loadtests import analysis, report

    try:
        summary = report.write(run)
    except (analysis.BadRun, OSError, ValueError) as error:
        _fail(f"{run}: {error}", as_json)
    _tell(run, summary, {}, as_json)


# -- running -----------------------------------------------------------------------------------------------------------


def _refuse_if_none_takes_part(scenario: Scenario) -> None:
    if not any(set(phase.only) & set(scenario.peers) for phase in scenario.phases):
        raise typer.BadParameter(f"no phase of {scenario.name} is for {', '.join(scenario.peers)}")


def _run(scenario: Scenario, out: Path, given: Given, as_json: bool) -> None:
    from loadtests import report
    from loadtests.running import run
    from loadtests.running.tools import NotPrepared, tools

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended however we are
    ended_early = False
    failed: dict[str, str] = {}
    try:
        failed = dict(run(scenario, out, tools(given), say=_say).failed)
    except NotPrepared as error:
        _fail(str(error), as_json)
    except KeyboardInterrupt:
        ended_early = True
        _say("ended early: what was recorded is kept")
    _tell(out, report.write(out), failed, as_json)
    if ended_early:
        sys.exit(130)
    if failed:
        sys.exit(1)


def _tell(folder: Path, summary: Any, failed: dict[str, str], as_json: bool) -> None:
    from loadtests import report

    found = {
        "run": str(folder),
        "report": str(folder / "report.md"),
        "failed": failed,
        "summary": summary.model_dump(mode="json"),
    }
    _show(
        as_json,
        found,
        report.verdict_table(summary),
        *(f"failed: {name}: {reason}" for name, reason in failed.items()),
        f"report: {folder / 'report.html'}",
        f"next: loramux bench compare {folder} OTHER_RUN",
    )


# -- files -------------------------------------------------------------------------------------------------------------


def _summary(path: Path) -> Any:
    from loadtests import analysis

    try:
        return analysis.load_summary(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} is no run: {error}") from error


def _latest(scenario: str, as_json: bool) -> Path:
    """The folder of the latest run of a scenario, or of any."""
    found = list(RUNS.glob(f"{scenario or '*'}-[0-9]*/summary.json"))
    if not found:
        _fail(f"no run of {scenario or 'any scenario'} lies in {RUNS}: name one with --run", as_json)
    return max(found, key=lambda path: path.stat().st_mtime).parent


# -- telling -----------------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _show(as_json: bool, value: Any, *lines: str) -> None:
    sys.stdout.write(json.dumps(value) + "\n" if as_json else "".join(f"{line}\n" for line in lines if line))


def _fail(text: str, as_json: bool) -> NoReturn:
    sys.stderr.write(json.dumps({"error": {"message": text}}) + "\n" if as_json else f"{text}\n")
    sys.exit(1)
