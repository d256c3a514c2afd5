"""`loramux play`: a served model plays mazes; what it solves is what the maze says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from adapters.cli.gateway import KEY_VARIABLE, LOOPBACK, find_gateway
from adapters.cli.options import AsJson, Config
from adapters.cli.output import count_bar, fail, out, show
from adapters.cli.work import usage
from adapters.errors import InvalidRequest, LoraMuxError

if TYPE_CHECKING:
    from training.playing.player import NotPlayed, Seen, Table
    from training.trajectory import Played, Task

EXAMPLE = "Example: loramux play maze:maze-grpo@3 --set easy-64 --greedy"
MAX_TOKENS = 16


def play(
    model: Annotated[str, typer.Argument(help="`base:name@7`, `name@canary`, or a base alone.")],
    set_name: Annotated[str | None, typer.Option("--set", help="Fixed set: easy-64 (the default), easy-512, hard-128.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Mazes of these seeds instead: `7,9,100-163`.")] = None,
    size: Annotated[int | None, typer.Option(help="Cells a side of mazes of --seeds.")] = None,
    spec: Annotated[Path | None, typer.Option(help="Spec of a run: its rules, decodings and dice.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help="Of sampling, where not --greedy; 1 without a spec.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest reply.")] = None,
    seed: Annotated[int | None, typer.Option(help="Where the dice of sampling begin.")] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, max=1000, help="Episodes at once.")] = 16,
    retries: Annotated[int, typer.Option(min=0, max=100, help="How often a request that failed is sent again.")] = 8,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="Limit for one answer.")] = 120.0,
    beside: Annotated[Path | None, typer.Option(help="Evaluation file of the trainer, to compare with.")] = None,
    save: Annotated[Path | None, typer.Option("--out", help="File for one line of JSON a maze.")] = None,
    show_seed: Annotated[int | None, typer.Option("--show", help="Play the maze of this seed alone, and draw it.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", "--gateway", help="Address; LORAMUX_GATEWAY_URL or the settings' by default.")
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Let a served model play mazes, and count what it solves. Ends with 1 if a maze could not be played, or differs."""
    from training.playing import telling
    from training.playing.choosing import chosen, decoded, longest_input, named_tasks, ruled
    from training.playing.comparing import as_lines, compared, read_played
    from training.playing.player import Seen, Table
    from training.trajectory import Played

    read = usage(lambda: chosen(spec))
    rules = usage(lambda: ruled(read, size))
    sampling = usage(lambda: decoded(read, greedy, temperature, max_tokens or (None if read else MAX_TOKENS)))
    name, tasks = usage(lambda: named_tasks(set_name, str(show_seed) if show_seed is not None else seeds, read, seed))
    door = find_gateway(url, config)
    try:
        there = read_played(beside) if beside else None
        longest = longest_input(read, sampling.max_generate_length)
        at = Table(door.model(model), rules, sampling, at_once, longest)
    except LoraMuxError as error:
        fail(error, as_json)
    seen, client = Seen(), _client(door.url, retries, timeout_s)
    if show_seed is not None:
        results = _answered(_shown(client, at, tasks[0], seen, not as_json), as_json)
    else:
        results = _answered(_played(client, at, tasks, seen, not as_json), as_json)
    done = [one for one in results if isinstance(one, Played)]
    if save:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(as_lines(done))
    comparison = compared(done, there) if there is not None else None
    data = telling.data(at, name, results, seen.refs, comparison)
    show(as_json, data, *telling.lines(data), f"lines: {save}" if save else None)
    if len(done) < len(results) or (comparison and not comparison.holds(greedy=at.sampling.temperature == 0)):
        raise typer.Exit(1)


async def _played(client: Any, at: Table, tasks: Sequence[Task], seen: Seen, bar: bool) -> list[Played | NotPlayed]:
    from training.playing.player import play as play_all

    count = 0
    with count_bar("mazes", bar) as advance:

        def heard(one: Played | NotPlayed) -> None:
            nonlocal count
            count += 1
            if advance:
                advance(count, len(tasks))

        async with client:
            return await play_all(client, at, tasks, seen, heard)


async def _shown(client: Any, at: Table, task: Task, seen: Seen, drawn: bool) -> list[Played | NotPlayed]:
    from training.playing.drawing import Show
    from training.playing.player import play_one

    async with client:
        if not drawn:
            return [await play_one(client, at, task, seen)]
        with Show(out, at.spec, task.maze_seed) as screen:
            return [await play_one(client, at, task, seen, screen)]


def _answered(work: Coroutine[Any, Any, list[Played | NotPlayed]], as_json: bool) -> list[Played | NotPlayed]:
    from training.playing.player import Unanswerable

    try:
        return asyncio.run(work)
    except Unanswerable as error:
        fail(InvalidRequest(f"the endpoint answers nobody who asks like this: {error}", reason=error.code), as_json)


def _client(url: str, retries: int, timeout_s: float) -> Any:
    import openai

    # a proxy of the environment can't reach this machine's own loopback
    trusts = urlsplit(url).hostname not in LOOPBACK
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=os.environ.get(KEY_VARIABLE) or "none",
        max_retries=retries,
        timeout=timeout_s,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=trusts),
    )
