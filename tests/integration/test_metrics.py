"""The metrics of the running product: one text for the whole node, whichever process answers."""

from __future__ import annotations

import re
import urllib.request

from tests.integration.stack import SLOTS, Stack

SAMPLE = re.compile(r"(loramux_\w+)\{(.*)\} (\S+)")
REPORTED_WITHIN_S = 30  # processes hand their numbers on every ten seconds


def samples(stack: Stack, name: str, **labels: str) -> dict[str, float]:
    """The series of a metric that carry these labels: the process' name to the value."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    found: dict[str, float] = {}
    for metric, label_text, value in SAMPLE.findall(text):
        there = dict(re.findall(r'(\w+)="([^"]*)"', label_text))
        if metric == name and labels.items() <= there.items():
            found[there["process"]] = found.get(there["process"], 0.0) + float(value)
    return found


async def test_store_calls_and_the_picture_of_the_registry_are_measured_on_the_whole_node(stack: Stack, published, ask) -> None:
    await ask(f"demo:{min(published)}")
    stack.wait_until(lambda: max(samples(stack, "loramux_registry_generation").values()) >= 1, REPORTED_WITHIN_S)
    stack.wait_until(lambda: max(samples(stack, "loramux_registry_adapters").values()) >= len(published), REPORTED_WITHIN_S)

    def polling() -> set[str]:
        listing = samples(stack, "loramux_store_calls_total", method="list", result="ok")
        return {process for process, calls in listing.items() if calls > 1}

    def fetching() -> set[str]:
        return set(samples(stack, "loramux_store_calls_total", method="get_range", result="ok"))

    # The gateway and the replica both poll, and one that polls has fetched. The gateway may have fetched too: a download goes
    # through it, and an earlier test may have made one.
    stack.wait_until(lambda: len(polling()) >= 2 and bool(fetching() & polling()), REPORTED_WITHIN_S)
    assert max(samples(stack, "loramux_store_call_seconds_count", method="list").values()) >= 1


async def test_how_many_adapters_are_where_is_measured(stack: Stack, published, ask) -> None:
    await ask(f"demo:{min(published)}")

    def most(name: str, **labels: str) -> float:
        return max(samples(stack, name, **labels).values(), default=0)

    # Each is waited for: what a replica of an earlier test reported last is still shown for a while.
    stack.wait_until(lambda: most("loramux_slots") == SLOTS, REPORTED_WITHIN_S)
    stack.wait_until(lambda: most("loramux_resident_adapters", tier="engine") >= 1, REPORTED_WITHIN_S)
    stack.wait_until(lambda: most("loramux_resident_adapters", tier="disk") >= 1, REPORTED_WITHIN_S)
    stack.wait_until(lambda: most("loramux_cache_bytes") > 0, REPORTED_WITHIN_S)


async def test_the_age_of_the_picture_is_seen_while_the_store_is_away(stack: Stack, published) -> None:
    stack.seaweed.proxy.refuse = True
    try:
        stack.wait_until(lambda: stack.get("/readyz")["registry_error"] == "unreachable", REPORTED_WITHIN_S)
        assert stack.get("/readyz")["status"] == "ok"
        stack.wait_until(lambda: max(samples(stack, "loramux_registry_age_seconds").values()) > 5, REPORTED_WITHIN_S)
        stack.wait_until(
            lambda: sum(samples(stack, "loramux_registry_refresh_errors_total", reason="unreachable").values()) >= 1,
            REPORTED_WITHIN_S,
        )
    finally:
        stack.seaweed.proxy.refuse = False
    stack.wait_until(lambda: stack.get("/readyz")["registry_error"] is None, REPORTED_WITHIN_S)
