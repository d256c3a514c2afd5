"""LoraMux through its own routes: what is published, where it is, and where it should be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx2
import psutil
import yaml

from loadtests.material import CONFIG, WEIGHTS, Adapter, Base
from loadtests.memory import processes_below
from loadtests.peers.peer import NotPut, check_room
from loadtests.records import Tier
from loadtests.servers import BIN, BUCKET, KEYS, free_port, process, wait_for_answer, wait_until
from loadtests.shaping import Store

PUT_TIMEOUT_S = 120.0
# Replicas follow the registry by polling once a second: what is right before and after so long stays so.
SETTLE_S = 2.0
LOOK_EVERY_S = 0.1
EVICT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 600.0  # an upload or a promotion that waits

Seen = Literal["remote", "disk", "engine", "loading"]
Ref = str


class LoraMux:
    """`slots` is how many adapters one replica's engine holds, by what it says itself."""

    name = "loramux"

    def __init__(
        self,
        url: str,
        base: str,
        pid: int | None = None,
        *,
        http: httpx2.Client | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self.base = base
        self.pid = pid
        self._http = http or httpx2.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S)
        self._clock_s = clock_s
        self._sleep = sleep
        self._versions: dict[tuple[str, Path], int] = {}
        self._names: dict[str, str] = {}  # by digest
        self._put_in_engine: dict[Ref, float] = {}

    def model(self, adapter: Adapter, *, alias: str | None = None) -> str:
        if alias is None:
            return self._ref(adapter)
        return f"{self.base}:{adapter.name}" if alias == "production" else f"{self.base}:{adapter.name}@{alias}"

    def version(self, adapter: Adapter) -> int:
        return self._versions[adapter.name, adapter.folder]

    def adapter_of(self, path: str) -> str | None:
        return next((self._names[part] for part in path.split("/") if part in self._names), None)

    def can_put(self, tier: Tier) -> bool:
        return True

    def needs_fresh(self, tier: Tier) -> bool:
        return False

    def loads(self) -> None:
        return None

    def processes(self) -> Mapping[str, Sequence[psutil.Process]]:
        return processes_below(self.pid) if self.pid else {}

    def check_replicas(self, count: int) -> None:
        """Raises NotPut when fewer are there."""
        if (seen := len(self._replicas())) < count:
            raise NotPut(self.base, "engine", f"{seen} of {count} replicas are there")

    # -- changes -------------------------------------------------------------------------------------------------------

    def add(self, adapter: Adapter) -> None:
        self._publish(adapter.name, adapter, promote="production", now=True)

    def republish(self, adapter: Adapter, content: Adapter) -> None:
        self._publish(adapter.name, content, promote="production", now=True)

    def promote(self, adapter: Adapter, content: Adapter) -> float:
        version = self._publish(adapter.name, content)
        began_s = self._clock_s()
        self._post("promote", name=adapter.name, alias="production", version=version)
        return self._clock_s() - began_s

    def evict(self, adapter: Adapter, tier: Tier) -> None:
        """Waits a while for requests that use it. Raises NotPut then."""
        deadline_s = self._clock_s() + EVICT_TIMEOUT_S
        while kept := self._give_up(self._ref(adapter), tier):
            if self._clock_s() > deadline_s:
                raise NotPut(adapter.name, tier, kept)
            self._sleep(LOOK_EVERY_S)

    def _publish(self, name: str, content: Adapter, **options: Any) -> int:
        query = {"base": self.base, "name": name, **{key: _text(value) for key, value in options.items()}}
        with (content.folder / CONFIG).open("rb") as config, (content.folder / WEIGHTS).open("rb") as weights:
            files = [("file", (CONFIG, config)), ("file", (WEIGHTS, weights))]
            answer = _checked(self._http.post(f"{self.url}/registry/v1/publish", params=query, files=files)).json()
        self._versions[name, content.folder] = answer["version"]
        self._names[answer["digest"]] = name
        if not answer.get("seen", True):
            self._post("refresh", named=False)
        return answer["version"]

    # -- tiers ---------------------------------------------------------------------------------------------------------

    def put(self, adapters: Sequence[Adapter], tier: Tier) -> None:
        """Through evictions, and prewarms that are taken back, or they would bring back what is evicted later."""
        refs = [self._ref(adapter) for adapter in adapters]
        if tier == "engine":
            check_room(adapters, self._slots())
        if tier == "remote":
            for ref in refs:  # also those that replicas say nothing of, since files of an earlier run may lie on a disk
                self._give_up(ref, tier)
        deadline_s = self._clock_s() + PUT_TIMEOUT_S
        while True:
            self._bring(refs, tier, deadline_s)
            self._sleep(SETTLE_S)
            if not self._elsewhere(refs, tier):
                break
        if tier == "engine":
            self._put_in_engine |= dict.fromkeys(refs, self._clock_s())

    def _bring(self, refs: Sequence[Ref], tier: Tier, deadline_s: float) -> None:
        """Until all are there. Raises NotPut."""
        prewarmed: set[Ref] = set()
        try:
            while elsewhere := self._elsewhere(refs, tier):
                if tier == "engine":
                    self._make_room(refs)
                kept = {ref: self._move(ref, seen, tier, prewarmed) for ref, seen in elsewhere.items()}
                if self._clock_s() > deadline_s:
                    ref, seen = next(iter(elsewhere.items()))
                    why = f" ({kept[ref]})" if kept[ref] else ""
                    raise NotPut(ref, tier, f"it is in {' and '.join(sorted(seen))}{why}")
                self._sleep(LOOK_EVERY_S)
        finally:
            for ref in prewarmed:
                self._prewarm("DELETE", ref)

    def _move(self, ref: Ref, seen: set[Seen], tier: Tier, prewarmed: set[Ref]) -> str:
        """One step towards the tier, and what kept it from that; what is on its way already is left alone."""
        if tier == "remote" or (tier == "disk" and "engine" in seen):
            return self._give_up(ref, tier)
        if ref not in prewarmed:
            prewarmed.add(ref)
            self._prewarm("POST", ref, tier=tier)
        return ""

    def _make_room(self, refs: Sequence[Ref]) -> None:
        """Others leave each replica's engine, down to the disk, as many as are in the way: first those that nobody put there."""
        for row in self._replicas():
            others = [ref for ref, one in row["adapters"].items() if one["tier"] == "engine" and ref not in refs]
            others.sort(key=lambda ref: self._put_in_engine.get(ref, 0.0))
            for ref in others[: max(0, len(others) + len(refs) - row["slots"])]:
                self._give_up(ref, "disk")

    def _elsewhere(self, refs: Sequence[Ref], tier: Tier) -> dict[Ref, set[Seen]]:
        """The refs that are not where they should be, and where they were seen."""
        rows = self._replicas()
        found = {ref: {seen_in(row, ref) for row in rows} for ref in refs}
        return {ref: seen for ref, seen in found.items() if not is_in(seen, tier)}

    def _replicas(self) -> list[dict[str, Any]]:
        """Raises NotPut when a replica does not say what it holds for long."""
        deadline_s = self._clock_s() + PUT_TIMEOUT_S
        while True:
            rows = of_base(_checked(self._http.get(f"{self.url}/registry/v1/residency")).json(), self.base)
            if rows and all(row.get("replica") for row in rows):
                return rows
            if self._clock_s() > deadline_s:
                raise NotPut(self.base, "engine", f"not all replicas say what they hold: {rows}")
            self._sleep(LOOK_EVERY_S)

    def _slots(self) -> int:
        return min(row["slots"] for row in self._replicas())

    def _give_up(self, ref: Ref, tier: Tier) -> str:
        """Why a replica keeps it, empty when none does."""
        name, version = self._parts(ref)
        answer = self._post("evict", name=name, version=version, tier=tier)
        return ", ".join(f"{row['tier']} ({row['reason']})" for row in answer["replicas"] if row["reason"])

    def _prewarm(self, method: str, ref: Ref, **more: Any) -> None:
        name, version = self._parts(ref)
        fields = {"base": self.base, "name": name, "target": str(version), **more}
        given = {"params": fields} if method == "DELETE" else {"json": fields}
        _checked(self._http.request(method, f"{self.url}/registry/v1/prewarm", **given))

    def _post(self, route: str, *, named: bool = True, **fields: Any) -> dict[str, Any]:
        body = {"base": self.base, **fields} if named else None
        return _checked(self._http.post(f"{self.url}/registry/v1/{route}", json=body)).json()

    def _ref(self, adapter: Adapter) -> Ref:
        return f"{self.base}:{adapter.name}@{self.version(adapter)}"

    def _parts(self, ref: Ref) -> tuple[str, int]:
        name, _, version = ref.removeprefix(f"{self.base}:").rpartition("@")
        return name, int(version)


def of_base(residency: dict[str, Any], base: str) -> list[dict[str, Any]]:
    """The rows of the base's replicas."""
    return residency.get("bases", residency)[base]["replicas"]


def seen_in(row: dict[str, Any], ref: Ref) -> Seen:
    """Where a replica has the adapter; one that it says nothing of is in the store alone."""
    one = row["adapters"].get(ref)
    if one is None:
        return "remote"
    return "loading" if one["state"] == "loading" else one["tier"]


def is_in(seen: set[Seen], tier: Tier) -> bool:
    """All replicas have it there. For `disk` one is enough, since nodes have disks, and no engine may have it."""
    return seen <= {"disk", "remote"} and "disk" in seen if tier == "disk" else seen == {tier}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checked(answer: httpx2.Response) -> httpx2.Response:
    """Raises HTTPStatusError that says what the server said."""
    if answer.is_error:
        raise httpx2.HTTPStatusError(f"{answer.status_code}: {answer.text[:500]}", request=answer.request, response=answer)
    return answer


# -- starting ----------------------------------------------------------------------------------------------------------


@contextmanager
def started(base: Base, store: Store, engine: Mapping[str, Any], folder: Path, replicas: int = 1) -> Iterator[LoraMux]:
    """`loramux up --no-demo` with an empty registry in the store. Raises NotStarted. Settings and log stay in `folder`."""
    with TemporaryDirectory(prefix="loramux-bench-") as cache:
        settings = settings_of(base, store.endpoint, engine, cache, replicas)
        config = folder / "loramux.yaml"
        config.write_text(yaml.safe_dump(settings))
        url = f"http://127.0.0.1:{settings['gateway']['port']}"
        command = [str(BIN / "loramux"), "up", "--no-demo", "--config", str(config)]
        with process(command, {}, cwd=str(folder), log=folder / "server.log") as running:
            wait_for_answer(url, base.id, running)
            peer = LoraMux(url, base.id, running.pid)
            wait_until(lambda: peer.check_replicas(replicas), f"{replicas} replicas")
            yield peer


def settings_of(base: Base, endpoint: str, engine: Mapping[str, Any], cache: str, replicas: int) -> dict[str, Any]:
    registry = {
        "url": f"s3://{BUCKET}/registry",
        "endpoint": endpoint,
        "access_key_id": KEYS["AWS_ACCESS_KEY_ID"],
        "secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    served = {
        "id": base.id,
        "source": base.source,
        "accelerator": base.accelerator,
        "engine": dict(engine),
        "env": dict(base.environment),
        "replicas": replicas,
    }
    gateway = {"port": free_port(), "num_cpus": 0.5}
    return {"registry": registry, "cache": {"dir": cache}, "gateway": gateway, "bases": [served]}
