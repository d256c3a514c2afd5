"""What all replicas of a base hold, summed up from what each says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

UNKNOWN: dict[str, Any] = {
    "replica": None,
    "rank": None,
    "node": None,
    "requests": 0,
    "slots": 0,
    "generation": None,
    "int_ids": [],
    "adapters": {},
}
"""The row of a replica that lives and did not answer in time."""


def summed(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One base's view: sums over its replicas, and their reports as they are under `replicas`, ordered by rank.

    `resident` has the refs in engines with their users, `slots` is that of one replica.
    """
    users: Counter[str] = Counter()
    for report in reports:
        for ref, adapter in report["adapters"].items():
            if adapter["tier"] == "engine":
                users[ref] += adapter["users"]
    view = {
        "requests": sum(report["requests"] for report in reports),
        "resident": dict(users),
        "int_ids": sorted(int_id for report in reports for int_id in report["int_ids"]),
        "slots": max((report["slots"] for report in reports), default=0),
        "replicas": sorted(reports, key=_order),
    }
    if any("engine_ids" in report for report in reports):
        view["engine_ids"] = sorted(int_id for report in reports for int_id in report.get("engine_ids", ()))
    return view


def _order(report: dict[str, Any]) -> tuple[bool, int, str]:
    rank = report["rank"]
    return rank is None, rank or 0, str(report["replica"])
