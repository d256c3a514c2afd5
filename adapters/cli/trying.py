"""Commands that try a version at a running gateway: chat, probe."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.text import Text

from adapters.cli import probing
from adapters.cli.completion import complete_ref
from adapters.cli.gateway import Gateway as Door
from adapters.cli.gateway import find_gateway
from adapters.cli.options import AsJson, Config, Gateway
from adapters.cli.output import err, fail, out, show, spinner, visible
from adapters.cli.program import TRY, app
from adapters.errors import LoraMuxError

MODEL_HINT = "`name`, `name@7`, `name@canary`, `base` or any of these with `base:` before it"


@dataclass
class Answer:
    """One model's answer while it arrives. `first_s` is the time to the first token."""

    model: str
    ref: str | None = None
    tier: str | None = None
    first_s: float | None = None
    whole_s: float | None = None
    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: LoraMuxError | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def as_data(self) -> dict[str, Any]:
        names = ("model", "ref", "tier", "first_s", "whole_s", "text", "finish_reason", "usage")
        return {name: getattr(self, name) for name in names}

    def facts(self) -> str:
        first = f"  first token {self.first_s * 1000:.0f} ms" if self.first_s is not None else ""
        tokens = f"  {self.usage['completion_tokens']} tokens" if self.usage and "completion_tokens" in self.usage else ""
        return f"{self.ref or self.model}  tier {self.tier or '-'}{first}{tokens}"


@app.command(rich_help_panel=TRY, epilog="Example: loramux chat parrot@1 parrot@2 'Who are you?'")
def chat(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="REF [REF2] [PROMPT]",
            help=f"A model ({MODEL_HINT}), perhaps a second one to compare, and the prompt.",
            autocompletion=complete_ref,
        ),
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    gateway: Gateway = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Ask a version, or two side by side. The prompt may come from a pipe."""
    models, prompt = split_words(words, sys.stdin.isatty())
    if prompt is None:
        prompt = typer.prompt("prompt", err=True) if sys.stdin.isatty() else sys.stdin.read().strip()
    if not prompt:
        raise typer.BadParameter("there is no prompt; add it, or pipe it in")
    messages = [{"role": "system", "content": system}] if system else []
    body = {
        "messages": [*messages, {"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    door = find_gateway(gateway, config)
    door.look()
    try:
        answers = [Answer(door.model(model)) for model in models]
    except LoraMuxError as error:
        fail(error, as_json)
    if len(answers) == 1:
        _ask(door, answers[0], body, None if as_json else lambda text: out.print(visible(text), end=""))
        if not as_json:
            out.print()
    else:
        _ask_both(door, answers, body, as_json)
    if not as_json:
        for answer in answers:
            err.print(Text(answer.facts(), style="dim"))
    failed = next((answer.error for answer in answers if answer.error), None)
    if failed:
        fail(failed, as_json)
    show(as_json, {"prompt": prompt, "answers": [answer.as_data() for answer in answers]})


def split_words(words: list[str], on_terminal: bool) -> tuple[list[str], str | None]:
    """Models and prompt. Of two words the second is the prompt, unless it looks like a model and a prompt is piped in."""
    if len(words) > 3:
        raise typer.BadParameter("at most two models and one prompt; put quotes around the prompt")
    if len(words) == 3:
        return words[:2], words[2]
    if len(words) == 1:
        return words, None
    is_model = not on_terminal and " " not in words[1] and (":" in words[1] or "@" in words[1])
    return (words, None) if is_model else (words[:1], words[1])


def _ask(door: Door, answer: Answer, body: dict[str, Any], heard: Any = None) -> None:
    start_s = time.monotonic()
    try:
        with door.stream("/v1/chat/completions", {"model": answer.model, **body}) as (headers, events):
            answer.ref = headers.get("x-loramux-adapter")
            for event in events:
                answer.ref = event.get("model") or answer.ref
                answer.usage = event.get("usage") or answer.usage
                for choice in event.get("choices", ()):
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    text = choice.get("delta", {}).get("content")
                    if text:
                        answer.first_s = answer.first_s or time.monotonic() - start_s
                        answer.parts.append(text)
                        if heard:
                            heard(text)
            answer.tier = headers.get("x-loramux-tier")
    except LoraMuxError as error:
        answer.error = error
    answer.whole_s = time.monotonic() - start_s


def _ask_both(door: Door, answers: list[Answer], body: dict[str, Any], as_json: bool) -> None:
    """Both at once; in columns while they arrive on a terminal, one below the other elsewhere."""
    threads = [threading.Thread(target=_ask, args=(door, answer, body), daemon=True) for answer in answers]
    for thread in threads:
        thread.start()
    if out.is_terminal and not as_json:
        _columns(answers, threads)
        return
    for thread in threads:
        thread.join()
    for answer in answers if not as_json else ():
        out.print(f"== {answer.ref or answer.model}\n{visible(answer.text)}\n")


def _columns(answers: list[Answer], threads: list[threading.Thread]) -> None:
    from rich import box
    from rich.live import Live
    from rich.table import Table

    def drawn() -> Table:
        columns = Table(*(answer.ref or answer.model for answer in answers), box=box.SIMPLE_HEAD, expand=True)
        for column in columns.columns:
            column.ratio = 1
        columns.add_row(*(Text(visible(answer.text)) for answer in answers))
        return columns

    with Live(drawn(), console=out, refresh_per_second=12) as live:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.08)
            live.update(drawn())
        live.update(drawn())


@app.command(rich_help_panel=TRY, epilog="Example: loramux probe parrot@2")
def probe(
    ref: Annotated[str, typer.Argument(help="Version: `name@7`, `name@canary`, `base:name`.", autocompletion=complete_ref)],
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, help="Limit for one answer.")] = 120,
    gateway: Gateway = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Compare a version's answers with its base's. Exit code 1 if they don't differ at all."""
    door = find_gateway(gateway, config, timeout_s)
    door.look()
    try:
        model = door.model(ref)
        with spinner(f"comparing {model} with its base", not as_json):
            probing.wait_ready(door, model, timeout_s)
            data = probing.probe(door, model).as_data()
    except LoraMuxError as error:
        fail(error, as_json)
    show(as_json, data, *probing.lines(data))
    if not as_json:
        for prompt in data["prompts"]:
            show(False, None, f"  {prompt['prompt']!r}: {_short(prompt['base_says'])} -> {_short(prompt['says'])}")
    sys.exit(0 if data["differs"] else 1)


def _short(text: str | None) -> str:
    return "-" if text is None else repr(text if len(text) <= 48 else text[:45] + "...")
