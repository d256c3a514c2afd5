"""`loramux train`, `loramux eval` and `loramux play`. What takes time to import is imported where it is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from adapters.cli.options import AsJson, Config
from adapters.cli.output import err, fail, show, table, visible
from adapters.errors import LoraMuxError
from training.playing import command as playing
from training.publishing import command as publishing

if TYPE_CHECKING:
    from training.runs.plan import Plan
    from training.runs.watching import Watching
    from training.spec import Inert, TrainSpec

RUNS = Path(".loramux/train")
SPECS = Path(__file__).parent / "specs"
DEFAULT = "run"
INTERRUPTED = 130


class SpecGroup(TyperGroup):
    """A first word that is no command is a spec's name or file."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else [DEFAULT, *args])


app = typer.Typer()
train = typer.Typer(
    cls=SpecGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Train an adapter as a spec says: here, or by SkyRL on a Ray cluster; reports; publishing what others trained.",
    epilog="Example: loramux train demo trainer.epochs=2",
)
app.add_typer(train, name="train", rich_help_panel="Run")
app.command("play", rich_help_panel="Try", epilog=playing.EXAMPLE)(playing.play)
train.command("publish", epilog=publishing.EXAMPLE)(publishing.publish)

SpecArgument = Annotated[str, typer.Argument(help="A spec: a YAML file, or the name of one that comes along (demo, h200).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, laid over the spec.", metavar="[KEY=VALUE]...")]


@train.command(DEFAULT, epilog="Example: loramux train run demo trainer.seed=7 --out .loramux/train/seventh")
def run_spec(
    spec: SpecArgument,
    overrides: Overrides = None,
    backend: Annotated[Literal["local", "skyrl"], typer.Option(help="Who trains: this machine, or SkyRL.")] = "local",
    address: Annotated[str | None, typer.Option(help="Ray Jobs address for skyrl: http://..., sagemaker_ray://...")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default below .loramux/train, by the spec.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Several runs, one after the other: how many from trainer.seed on, or which, with commas.")
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Train, `train SPEC` for short. The same command goes on where a run was stopped or killed (trainer.resume_mode)."""
    loaded = _spec(spec, overrides)
    if backend == "skyrl":
        _submit(loaded, address, as_json)
        return
    if address:
        raise typer.BadParameter("--address is for --backend skyrl")
    _quiet_engine()
    from training.runs import start
    from training.runs.stopping import Stopping
    from training.spec import inert_locally

    _say_inert(inert_locally(loaded))
    folder = out or RUNS / Path(spec).stem
    job = start.Job(loaded, folder, _seeds(seeds, loaded.trainer.seed), keep_paths=out is None, config=config)
    stopping = Stopping(_say)
    hands = start.Hands(lambda plan: _watching(plan, as_json), stopping, _say)
    ended = _or_fail(lambda: start.train(job, hands, start.rollouts), as_json)
    _tell_result(folder, [asdict(one) for one in ended], as_json)
    if stopping.asked():
        sys.exit(INTERRUPTED)
    if any(one.reason != "finished" for one in ended):
        sys.exit(1)


@train.command(epilog="Example: loramux train report .loramux/train/h200/seed-*")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several differ by their seeds.")],
    out: Annotated[Path | None, typer.Option(help="Folder for it; the run's, or the one that all runs lie in.")] = None,
    as_json: AsJson = False,
) -> None:
    """Curves, solve rates at the last step with their spread, cost and recovery, from the events that runs left."""
    from training.runs import report as reports

    place = out or reports.place_for(runs)
    found = _or_fail(lambda: reports.write(runs, place), as_json)
    show(as_json, found, *reports.result_lines(found), f"report: {place / 'report.md'}")


@train.command("suggest-ckpt-interval", epilog="Example: loramux train suggest-ckpt-interval RUN --failure-every-h 6")
def suggest_interval(
    run: Annotated[Path, typer.Argument(help="Folder of a run, whose steps and checkpoints were timed.")],
    failure_every_h: Annotated[float, typer.Option("--failure-every-h", min=1e-6, help="Expected time to a failure, in hours.")],
    as_json: AsJson = False,
) -> None:
    """How many steps to let pass between checkpoints, from measured times and how long machines last."""
    from training.runs.interval import measured, suggestions
    from training.runs.summary import load

    costs = _or_fail(lambda: measured(load(run)), as_json)
    found = suggestions(costs, failure_every_h * 3600)
    rows = [[one.rule, f"{one.interval_s:.0f} s", str(one.ckpt_interval), f"{one.lost_share:.2%}"] for one in found]
    show(
        as_json,
        {"costs": asdict(costs), "suggestions": [asdict(one) for one in found]},
        f"a step takes {costs.step_s:.1f} s, writing a checkpoint {costs.write_s:.2f} s",
        *table(["rule", "interval", "trainer.ckpt_interval", "time lost"], rows),
    )


@app.command("eval", rich_help_panel="Run", epilog="Example: loramux eval --base maze-base --adapter maze-grpo@3 --greedy")
def evaluate(
    base: Annotated[Path, typer.Option(help="Folder of the base model.")],
    adapter: Annotated[str | None, typer.Option(help="Folder of an adapter, or a version in the registry: `name@7`.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="easy-64 (the default), easy-512, hard-128; may be repeated.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Only greedily.")] = False,
    sampled: Annotated[bool, typer.Option("--sampled", help="Only sampled; without --greedy and --sampled, both.")] = False,
    spec: Annotated[str, typer.Option(help="Spec whose rules, sampling and engine count.")] = "demo",
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a line of JSON a maze.")] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Let a base, alone or with an adapter, play fixed sets on this machine; solves are counted by the environment."""
    from training.maze import HELD_OUT

    if unknown := [name for name in sets or () if name not in HELD_OUT]:
        raise typer.BadParameter(f"--set {unknown[0]}: one of {', '.join(HELD_OUT)}")
    _quiet_engine()
    from training.runs import evaluating, start
    from training.runs.watching import told

    folder = _or_fail(lambda: _adapter_folder(adapter, config), as_json)
    loaded = _or_fail(lambda: evaluating.fitted(_spec(spec, overrides), base, folder), as_json)
    decodings = [name for name, wanted in (("sampled", sampled), ("greedy", greedy)) if wanted or greedy == sampled]
    found = []

    def play() -> None:
        for event in evaluating.evaluate(loaded, folder, sets or ["easy-64"], decodings, out, start.rollouts):
            found.append({**asdict(event), "solve_rate": event.solve_rate})
            if not as_json:
                show(False, None, told(event).partition(": ")[2])

    _or_fail(play, as_json)
    if as_json:
        show(True, found)


# -- what a command needs ----------------------------------------------------------------------------------------------


def _spec(name: str, overrides: list[str] | None) -> TrainSpec:
    """A wrong spec is wrong usage."""
    from training.spec import BadTrainSpec, TrainSpec

    shipped = SPECS / f"{name}.yaml"
    file = shipped if not Path(name).exists() and shipped.exists() else Path(name)
    try:
        return TrainSpec.load(file, overrides or ())
    except BadTrainSpec as error:
        raise typer.BadParameter(str(error)) from None


def _seeds(said: str | None, first: int) -> tuple[int, ...]:
    if said is None:
        return (first,)
    try:
        numbers = [int(part) for part in said.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (1 if len(numbers) == 1 else 0) or len(set(numbers)) < len(numbers):
        raise typer.BadParameter(f"--seeds {said}: how many, from 1, or different seeds with commas between them")
    return tuple(range(first, first + numbers[0])) if len(numbers) == 1 else tuple(numbers)


def _say_inert(found: Iterable[Inert]) -> None:
    for one in found:
        _say(f"{one.key}={one.value} changes nothing: {one.why}")


def _submit(spec: TrainSpec, address: str | None, as_json: bool) -> None:
    from training.skyrl.overrides import inert_in_skyrl
    from training.skyrl.submit import submit

    if not address:
        raise typer.BadParameter("--backend skyrl needs --address, that of the cluster's Ray Jobs")
    _say_inert(inert_in_skyrl(spec))
    job = _or_fail(lambda: submit(spec, address), as_json)
    show(as_json, asdict(job), f"submitted: {job.job_id}", f"next: {job.logs_command()}")


def _adapter_folder(said: str | None, config: Path | None) -> Path | None:
    """A folder as it is; a version is pulled once, to where a second evaluation finds it."""
    if said is None or Path(said).is_dir():
        return Path(said) if said else None
    from adapters.cli.pulling import pull_version
    from adapters.cli.work import find_ref, run

    async def pulled(registry: Any) -> Path:
        manifest = await registry.manifest(await find_ref(registry, said, None))
        folder = RUNS / "pulled" / manifest.digest
        await pull_version(registry.store, manifest, folder)
        return folder

    found: Path = run(config, pulled)
    return found


def _watching(plan: Plan, as_json: bool) -> Watching:
    from training.runs.watching import Lines, Screen

    return Screen(plan, err) if err.is_terminal and not as_json else Lines(plan, _say)


def _quiet_engine() -> None:
    """Before the engine is imported: what it says of itself would run over what the run says."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _tell_result(folder: Path, ended: list[dict[str, Any]], as_json: bool) -> None:
    import json

    from training.runs.report import result_lines

    try:
        found = json.loads((folder / "summary.json").read_bytes())
    except OSError:
        show(as_json, {"ended": ended, "summary": None})
        return
    show(as_json, {"ended": ended, "summary": found}, *result_lines(found), f"report: {folder / 'report.md'}")


def _or_fail(work: Callable[[], Any], as_json: bool) -> Any:
    """What is refused is said without a trace, exit code 1; what breaks shows one."""
    try:
        return work()
    except LoraMuxError as error:
        fail(error, as_json)
    except (ValueError, RuntimeError) as error:
        _refuse(error, as_json)
    except KeyboardInterrupt:
        _say("ended where it was; the same command goes on from the last checkpoint")
        sys.exit(INTERRUPTED)


def _refuse(error: Exception, as_json: bool) -> NoReturn:
    import json

    from training.runs.start import REFUSALS

    if not isinstance(error, REFUSALS):
        raise error
    sys.stderr.write(json.dumps({"error": {"message": str(error)}}) + "\n" if as_json else f"{visible(str(error))}\n")
    sys.exit(1)


def _say(text: str) -> None:
    err.print(visible(text))
