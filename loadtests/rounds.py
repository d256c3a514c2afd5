"""4,000 loads and evictions: does memory come to rest, and does the engine hold what we think: `python -m loadtests.rounds`.

Sixteen adapters and four slots, asked for in turn, so that nearly every request loads one and evicts another. The memory of
engine, replica and gateway (what belongs to each process alone) is sampled every 25 loads.

A plateau is a second half in which each of them grows by less than 250 bytes a load, which is less than a forgotten entry of a
table takes, and by less than a twentieth of itself in an hour of nothing but loads. The first half is for what fills once: Python
keeps up to 2,000 freed tuples of each length for the next ones, and fills that in about as many requests. The slopes are medians
over all pairs of samples, so that one collection of garbage decides nothing. Then half as many requests find their adapter in the
engine: what grows there too is the price of a request or of time (logs, metrics), not of loads, and is shown beside it. At the
end the engine's own list of adapters must equal our table.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from loadtests.client import Answer, ask, client
from loadtests.figures import Figure, new_results, percentile, write
from loadtests.material import FEW_SLOTS, SLOTS, WORK, DemoMaterial, make_material
from loadtests.memory import Sample, growth, processes_below, sample
from loadtests.product import base_view, configure, replicas_of, up, wait_for_models
from loadtests.servers import s3_server
from loadtests.traced import errors_of, leaders, model_of

ADAPTERS = 4 * SLOTS
EVERY = 25
FORGOTTEN_ENTRY_BYTES = 250
SHARE_IN_AN_HOUR = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=new_results("rounds"))
    parser.add_argument("--work", type=Path, default=WORK, help="where base and adapters are kept")
    parser.add_argument("--rounds", type=int, default=4000, help="loads, each of which evicts one")
    options = parser.parse_args()
    material = make_material(options.work, ADAPTERS)
    with s3_server() as (endpoint, _), tempfile.TemporaryDirectory(prefix="loramux-bench-") as folder:
        setting = configure(material, endpoint, Path(folder), engine=FEW_SLOTS)
        with up(setting) as pid:
            setting.publish_all(material, material.folders)
            wait_for_models(setting.url, len(material.folders) + 1)
            began = time.monotonic()
            done, samples = asyncio.run(rounds(setting.url, pid, list(material.folders), options.rounds))
            took_s = time.monotonic() - began
            hot = asyncio.run(without_loads(setting.url, pid, done[-1][0], options.rounds // 2))
            table = audited(setting.url)
    figures = figures_of(material, done, samples, hot, table, took_s)
    about = {"adapters": ADAPTERS, "slots": SLOTS, "rounds": options.rounds, "engine": FEW_SLOTS}
    taken = {"samples": documents(samples), "samples_without_loads": documents(hot)}
    write(options.out, about, figures, **taken, audit=table, errors=errors_of([answer for _, answer in done]))


async def rounds(url: str, pid: int, names: list[str], number: int) -> tuple[list[tuple[str, Answer]], list[Sample]]:
    """Asks for one adapter after another until `number` loads were made, or too many requests came to nothing."""
    done: list[tuple[str, Answer]] = []
    processes, loads = processes_below(pid), 0
    samples = [sample(processes, 0)]
    async with client() as http:
        for model in itertools.islice(itertools.cycle(map(model_of, names)), 3 * number):
            done.append((model, await ask(http, url, model, max_tokens=4)))
            loads += leaders([done[-1][1]])
            if loads - samples[-1].loads >= EVERY:
                samples.append(sample(processes, loads))
            if loads >= number:
                break
    return done, samples


async def without_loads(url: str, pid: int, model: str, number: int) -> list[Sample]:
    """Samples over `number` requests for an adapter that is in the engine; they count requests in the place of loads."""
    processes = processes_below(pid)
    samples = [sample(processes, 0)]
    async with client() as http:
        for asked in range(1, number + 1):
            await ask(http, url, model, max_tokens=4)
            if asked % EVERY == 0:
                samples.append(sample(processes, asked))
    return samples


def documents(samples: list[Sample]) -> list[dict[str, Any]]:
    return [{"number": one.loads, "at_s": round(one.at_s - samples[0].at_s, 1), "bytes": one.bytes_of} for one in samples]


def audited(url: str) -> dict[str, list[int]]:
    """The integer ids of our table and those that the engine itself lists, of each replica."""
    with httpx2.Client(trust_env=False, timeout=60) as http:
        view = http.get(f"{url}/registry/v1/residency", params={"audit": "true"}).raise_for_status().json()
    rows = replicas_of(view) or [base_view(view)]
    return {
        "table": sorted(number for row in rows for number in row["int_ids"]),
        "engine": sorted(number for row in rows for number in row["engine_ids"]),
    }


def figures_of(
    material: DemoMaterial,
    done: list[tuple[str, Answer]],
    samples: list[Sample],
    hot: list[Sample],
    table: dict[str, Any],
    took_s: float,
) -> list[Figure]:
    answers = [answer for _, answer in done]
    loads = leaders(answers)
    figures = [
        Figure("loads, each with an eviction but the first", loads, "", samples[-1].loads, ">="),
        Figure("loads a second", loads / took_s, "1/s"),
        Figure("requests that loaded nothing", len(done) - loads, f"of {len(done)}"),
        Figure("failures", sum(not answer.good for answer in answers), f"of {len(done)}", 0),
        Figure("wrong answers (their first four tokens)", begun_wrong(material, done), f"of {len(done)}", 0),
        Figure("TTFT of a load, p50", percentile((a.ttft_ms for a in answers if a.load == "leader"), 0.5), "ms"),
        Figure("adapters in the engine, not in our table or the other way", differing(table), "", 0),
    ]
    for part in samples[0].bytes_of:
        grown, hot_grown = growth(samples, part), growth(hot, part)
        per_hour = SHARE_IN_AN_HOUR * grown.first_bytes
        figures += [
            Figure(f"{part}: memory, third quarter of the run", grown.first_bytes / 1e6, "MB"),
            Figure(f"{part}: memory, last quarter", grown.last_bytes / 1e6, "MB"),
            Figure(f"{part}: growth per load in the second half", grown.bytes_per_load, "B", FORGOTTEN_ENTRY_BYTES),
            Figure(f"{part}: growth in an hour of such loads", grown.bytes_per_hour / 1e6, "MB", per_hour / 1e6),
            Figure(f"{part}: growth per request that loads nothing", hot_grown.bytes_per_load, "B"),
        ]
    return figures


def begun_wrong(material: DemoMaterial, done: list[tuple[str, Answer]]) -> int:
    """Short answers are the beginning of the adapter's sentence."""
    return sum(answer.good and not material.sentences[model.partition(":")[2]].startswith(answer.text) for model, answer in done)


def differing(table: dict[str, list[int]]) -> int:
    return len(set(table["table"]) ^ set(table["engine"]))


if __name__ == "__main__":
    main()
