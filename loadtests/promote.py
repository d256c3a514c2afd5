"""A promotion under steady traffic, on this machine: `python -m loadtests.promote --out DIR`.

Clients ask an alias all the time; one more asks for others in turn, so that slots are fought for. First nothing else happens:
that is hot. Then a new version is published by the command and promoted by the route that the command uses, which answers when
the version is warm and the alias has moved. Of the requests after the move (at least 300) each must find it in the engine. The
same traffic some time later is the control: as much as p99 differs by itself. Then a version is promoted, by the command, whose
files were damaged in the store: it must fail with the reason, and the alias must stay. Writes `summary.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from loadtests.client import Answer, ask, client
from loadtests.figures import Figure, median, new_results, percentile, write
from loadtests.material import FEW_SLOTS, SLOTS, WORK, DemoMaterial, make_material
from loadtests.product import BASE, Setting, configure, up, wait_for_models
from loadtests.servers import BUCKET, s3_server
from loadtests.traced import errors_of, model_of

NAME = "steady"
ADAPTERS = 3 + 2 * SLOTS  # versions one, two and the damaged one; the rest asks beside the alias
AFTER = 300
OTHERS_EVERY_S = 1.0
PATIENCE_S = 60
PROMOTED_WITHIN_S = 300


@dataclass(frozen=True)
class Said:
    """What came of a promotion: whether it was made, and the words."""

    moved: bool
    words: str


@dataclass(frozen=True)
class Watched:
    """The traffic on the alias while something happened, what came of that, and how long it took."""

    answers: list[Answer]
    said: Said
    took_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=new_results("promote"))
    parser.add_argument("--work", type=Path, default=WORK, help="where base and adapters are kept")
    parser.add_argument("--hot", type=int, default=600, help="requests that say what hot is")
    parser.add_argument("--after", type=int, default=AFTER, help="requests after the move, at least")
    parser.add_argument("--clients", type=int, default=2, help="clients that ask the alias all the time")
    options = parser.parse_args()
    material = make_material(options.work, ADAPTERS)
    with s3_server() as (endpoint, store), tempfile.TemporaryDirectory(prefix="loramux-bench-") as folder:
        setting = configure(material, endpoint, Path(folder), engine=FEW_SLOTS)
        with up(setting):
            figures, parts = asyncio.run(measure(setting, store, material, options))
    about = {"clients": options.clients, "slots": SLOTS, "adapters": ADAPTERS - 2, "engine": FEW_SLOTS}
    write(options.out, about, figures, **parts)


async def measure(
    setting: Setting, store: Any, material: DemoMaterial, options: argparse.Namespace
) -> tuple[list[Figure], dict[str, Any]]:
    names = list(material.folders)
    first, second, damaged, others = names[0], names[1], names[2], names[3:]
    setting.publish(NAME, material.folders[first])
    setting.publish_all(material, others)
    wait_for_models(setting.url, len(others) + 2)
    async with Traffic(setting.url, options.clients, [model_of(name) for name in others]) as traffic:
        await traffic.answers_after(20)
        hot = await traffic.answers_after(options.hot)
        setting.publish(NAME, material.folders[second], promote=False)
        moved = await watched(traffic, lambda: by_route(setting, 2), options.after, version=2)
        later = await traffic.answers_after(options.hot)
        publish_damaged(setting, store, material.folders[damaged], 3)
        stayed = await watched(traffic, lambda: by_command(setting, 3), options.after)
        alias = alias_of(setting)
    everything = [*hot, *moved.answers, *later, *stayed.answers]
    figures = [*of_move(hot, moved, later), *of_damaged(stayed, alias), *of_all(everything, material, first, second)]
    parts = {"promote_said": moved.said.words, "damaged_said": stayed.said.words, "errors": errors_of(everything)}
    return figures, parts | {"tiers_after": dict(Counter(answer.tier for answer in moved.answers if by(answer, 2)))}


def by_route(setting: Setting, version: int) -> Said:
    body = {"base": BASE, "name": NAME, "version": version}
    with httpx2.Client(trust_env=False, timeout=PROMOTED_WITHIN_S) as http:
        answer = http.post(f"{setting.url}/registry/v1/promote", json=body)
    return Said(answer.status_code == 200, answer.text[:600])


def by_command(setting: Setting, version: int) -> Said:
    done = setting.command("promote", NAME, str(version))
    return Said(done.returncode == 0, (done.stdout + done.stderr).strip()[-600:])


def alias_of(setting: Setting) -> int:
    with httpx2.Client(trust_env=False) as http:
        answer = http.get(f"{setting.url}/registry/v1/adapter", params={"base": BASE, "name": NAME})
    return answer.raise_for_status().json()["aliases"]["production"]


class Traffic:
    """Clients that ask the alias until the traffic ends, and one that asks for others in turn, to keep the slots fought for."""

    def __init__(self, url: str, clients: int, others: list[str]) -> None:
        self._url = url
        self._clients = clients
        self._others = others
        self._answers: list[Answer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Traffic:
        self._http = client()
        works = [self._alias() for _ in range(self._clients)] + [self._beside()]
        self._tasks = [asyncio.ensure_future(work) for work in works]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    @property
    def count(self) -> int:
        return len(self._answers)

    def since(self, count: int) -> list[Answer]:
        return self._answers[count:]

    async def answers_after(self, number: int) -> list[Answer]:
        """The next `number` answers from the alias."""
        began = self.count
        await self.until(lambda: self.count >= began + number)
        return self._answers[began : began + number]

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0.05)
            for task in self._tasks:
                if task.done():
                    task.result()

    async def _alias(self) -> None:
        while True:
            self._answers.append(await ask(self._http, self._url, model_of(NAME)))

    async def _beside(self) -> None:
        while True:
            for model in self._others:
                await ask(self._http, self._url, model)
                await asyncio.sleep(OTHERS_EVERY_S)


async def watched(traffic: Traffic, promotion: Callable[[], Said], after: int, version: int | None = None) -> Watched:
    """Promotes beside the traffic until `after` requests that began after it were answered, or, with a version, were
    answered by that version."""
    before, began = traffic.count, time.perf_counter()
    done = await asyncio.to_thread(promotion)
    ended = time.perf_counter()

    def enough() -> bool:
        seen = traffic.since(before)
        if version is not None:
            late = time.perf_counter() > ended + PATIENCE_S and not any(by(answer, version) for answer in seen)
            return late or sum(by(answer, version) for answer in seen) >= after
        return sum(answer.began_s > ended for answer in seen) >= after

    await traffic.until(enough)
    return Watched(traffic.since(before), done, ended - began)


def by(answer: Answer, version: int) -> bool:
    return answer.model == f"{model_of(NAME)}@{version}"


def publish_damaged(setting: Setting, store: Any, folder: Path, version: int) -> None:
    """A version that is published whole, and whose weights are other bytes in the store afterwards; what replicas fetched to
    their node meanwhile, whole, is given up again."""
    before = blobs(store)
    setting.publish(NAME, folder, promote=False)
    for key in blobs(store) - before:
        size = store.head_object(Bucket=BUCKET, Key=key)["ContentLength"]
        store.put_object(Bucket=BUCKET, Key=key, Body=b"\0" * size)
    setting.evict(NAME, version)


def blobs(store: Any) -> set[str]:
    pages = store.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="registry/blobs/")
    keys = {row["Key"] for page in pages for row in page.get("Contents", [])}
    return {key for key in keys if key.endswith(".safetensors")}


# -- figures -----------------------------------------------------------------------------------------------------------


def of_move(hot: list[Answer], moved: Watched, later: list[Answer]) -> list[Figure]:
    after = [answer for answer in moved.answers if by(answer, 2)]
    return [
        Figure("promotion made", float(moved.said.moved), "", 1, ">="),
        Figure("promotion, from asking until it was made", moved.took_s, "s"),
        Figure("requests after the move", len(after), "", AFTER, ">="),
        Figure("of them, not tier engine", sum(answer.tier != "engine" for answer in after), f"of {len(after)}", 0),
        Figure("TTFT hot, p50", median(ttfts(hot)), "ms"),
        Figure("TTFT hot, p99", p99(hot), "ms"),
        Figure("TTFT after the move, p50", median(ttfts(after)), "ms"),
        Figure("TTFT after the move, p99", p99(after), "ms"),
        Figure("p99 after the move over hot p99", p99(after) / p99(hot), "times", 1.3),
        Figure("control: p99 of the same traffic later, over hot p99", p99(later) / p99(hot), "times"),
        Figure("answers by version 1 to requests sent after the first answer by version 2", backwards(moved.answers), "", 0),
    ]


def of_damaged(stayed: Watched, alias: int) -> list[Figure]:
    return [
        Figure("promotion of a damaged version made", float(stayed.said.moved), "", 0),
        Figure("promotion of a damaged version, until it was refused", stayed.took_s, "s"),
        Figure("version that the alias names afterwards", alias, "", 2),
        Figure("answers by the damaged version, or by none", sum(not by(answer, 2) for answer in stayed.answers), "", 0),
    ]


def of_all(answers: list[Answer], material: DemoMaterial, first: str, second: str) -> list[Figure]:
    texts = {1: material.sentences[first], 2: material.sentences[second]}
    wrong = sum(answer.good and answer.text != texts.get(version_of(answer)) for answer in answers)
    return [
        Figure("failures, over all requests", sum(not answer.good for answer in answers), f"of {len(answers)}", 0),
        Figure("wrong answers", wrong, f"of {len(answers)}", 0),
    ]


def version_of(answer: Answer) -> int:
    number = answer.model.rpartition("@")[2]
    return int(number) if number.isdigit() else 0


def backwards(answers: list[Answer]) -> int:
    """One gateway has one picture: once it has sent a request to the new version, later ones don't go to the old."""
    begun = min((answer.began_s + answer.total_ms / 1e3 for answer in answers if by(answer, 2)), default=float("inf"))
    return sum(by(answer, 1) and answer.began_s > begun for answer in answers)


def ttfts(answers: list[Answer]) -> list[float]:
    return [answer.ttft_ms for answer in answers if answer.good]


def p99(answers: list[Answer]) -> float:
    return percentile(ttfts(answers), 0.99)


if __name__ == "__main__":
    main()
