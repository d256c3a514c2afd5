"""Adapters put into tiers and checked, against a scripted LoraMux: routes, replicas that follow later, and a clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loadtests.material import CONFIG, WEIGHTS, Adapter, Base
from loadtests.peers import CannotDo, NotPut, attached
from loadtests.peers.loramux import LoraMux, settings_of
from loadtests.peers.stock import AdapterPath, Stock
from loadtests.peers.vllm import VLLM, flags_of
from loadtests.servers import NotStarted

SLOTS = 3


@dataclass
class Gateway:
    """A base `demo` with two replicas of three slots on one node. Publications and prewarms come true a while later."""

    now_s: float = 0.0
    follows_s: float = 1.0
    publishes_to: str = "remote"
    stuck: dict[str, str] = field(default_factory=dict)  # refs that no replica gives up, and why
    broken: set[str] = field(default_factory=set)  # refs that never get anywhere
    tiers: dict[str, str] = field(default_factory=dict)
    directives: dict[str, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    silent: int = 0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        due = [what for at_s, what in self.later if at_s <= self.now_s]
        self.later = [(at_s, what) for at_s, what in self.later if at_s > self.now_s]
        for what in due:
            what()

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        route = request.url.path.removeprefix("/registry/v1/")
        self.asked.append(f"{request.method} {route}")
        fields = dict(request.url.params)
        if request.headers.get("content-type") == "application/json":
            fields |= json.loads(request.content or b"{}")
        return httpx2.Response(200, json=getattr(self, f"_{request.method.lower()}_{route}")(fields))

    def _get_residency(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.silent -= 1
        rows = {ref: {"tier": tier, "state": "ready"} for ref, tier in self.tiers.items() if tier != "remote"}
        replicas = [{"replica": f"r{k}", "slots": SLOTS, "adapters": rows} for k in range(2)]
        return {"bases": {"demo": {"replicas": [*replicas, {"replica": None}] if self.silent >= 0 else replicas}}}

    def _post_publish(self, fields: dict[str, Any]) -> dict[str, Any]:
        version = self.versions[fields["name"]] = self.versions.get(fields["name"], 0) + 1
        self._soon(f"demo:{fields['name']}@{version}", self.publishes_to)
        return {"version": version, "digest": f"d-{fields['name']}-{version}", "seen": False}

    def _post_refresh(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _post_promote(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.now_s += 1.5
        return {}

    def _post_evict(self, fields: dict[str, Any]) -> dict[str, Any]:
        ref = f"demo:{fields['name']}@{fields['version']}"
        if ref not in self.stuck:
            order = ("remote", "disk", "engine")
            self.tiers[ref] = min(self.tiers.get(ref, "remote"), fields["tier"], key=order.index)
        return {"replicas": [{"replica": "r0", "tier": self.tiers[ref], "reason": self.stuck.get(ref)}]}

    def _post_prewarm(self, fields: dict[str, Any]) -> dict[str, Any]:
        ref = f"demo:{fields['name']}@{fields['target']}"
        self.directives[ref] = fields["tier"]
        self._soon(ref, fields["tier"])
        return {}

    def _delete_prewarm(self, fields: dict[str, Any]) -> dict[str, Any]:
        del self.directives[f"demo:{fields['name']}@{fields['target']}"]
        return {}

    def _soon(self, ref: str, tier: str) -> None:
        if ref not in self.broken:
            self.later.append((self.now_s + self.follows_s, lambda: self.tiers.update({ref: tier})))


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def peer(gateway: Gateway) -> LoraMux:
    http = httpx2.Client(transport=httpx2.MockTransport(gateway))
    return LoraMux("http://gateway", "demo", http=http, clock_s=lambda: gateway.now_s, sleep=gateway.sleep)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    return [adapter(tmp_path, k) for k in range(5)]


def adapter(folder: Path, index: int) -> Adapter:
    made = folder / f"a{index}"
    made.mkdir(exist_ok=True)
    (made / CONFIG).write_text(json.dumps({"base_model_name_or_path": "base"}))
    (made / WEIGHTS).write_bytes(bytes([index]))
    return Adapter(f"cold-{index}", "cold", index, 8, 1, made, None)


def added(peer: LoraMux, adapters: list[Adapter]) -> list[Adapter]:
    for one in adapters:
        peer.add(one)
    return adapters


def refs(adapters: list[Adapter]) -> list[str]:
    return [f"demo:{one.name}@1" for one in adapters]


class TestPutting:
    @pytest.mark.parametrize("tier", ["remote", "disk", "engine"])
    @pytest.mark.parametrize("before", ["remote", "disk", "engine"])
    def test_every_tier_is_reached_from_every_other(self, peer, gateway, adapters, tier, before):
        some = added(peer, adapters[:SLOTS])
        peer.put(some, before)
        peer.put(some, tier)
        assert {gateway.tiers[ref] for ref in refs(some)} == {tier}

    def test_prewarms_are_taken_back(self, peer, gateway, adapters):
        peer.put(added(peer, adapters[:2]), "engine")
        assert gateway.directives == {}

    def test_what_a_publication_brings_later_is_sent_away_again(self, peer, gateway, adapters):
        gateway.publishes_to = "disk"
        some = added(peer, adapters)
        peer.put(some, "remote")
        gateway.sleep(10)
        assert {gateway.tiers[ref] for ref in refs(some)} == {"remote"}

    def test_it_evicts_what_replicas_say_nothing_of(self, peer, gateway, adapters):
        peer.put(added(peer, adapters[:1]), "remote")
        assert "POST evict" in gateway.asked

    def test_others_leave_the_engine_to_make_room(self, peer, gateway, adapters):
        old, new = added(peer, adapters)[:2], adapters[2:4]
        peer.put(old, "engine")
        peer.put(new, "engine")
        assert [gateway.tiers[ref] for ref in refs(new)] == ["engine"] * 2
        assert sorted(gateway.tiers[ref] for ref in refs(old)) == ["disk", "engine"]

    def test_those_that_nobody_put_there_leave_first(self, peer, gateway, adapters):
        added(peer, adapters)
        mine, theirs, new = adapters[:1], adapters[1:2], adapters[2:3]
        peer.put(mine, "engine")
        gateway.tiers |= {"demo:x@1": "engine", refs(theirs)[0]: "engine"}
        peer.put(new, "engine")
        assert gateway.tiers[refs(mine)[0]] == "engine"

    def test_what_was_put_into_the_engine_just_before_stays_if_there_is_room(self, peer, gateway, adapters):
        first, second = added(peer, adapters)[:1], adapters[1:3]
        peer.put(first, "engine")
        peer.put(second, "engine")
        assert {gateway.tiers[ref] for ref in refs(adapters[:3])} == {"engine"}

    def test_more_than_the_engine_holds_are_refused_with_the_numbers(self, peer, adapters):
        with pytest.raises(NotPut, match="4 adapters are wanted there, and it has 3 places") as caught:
            peer.put(added(peer, adapters[:4]), "engine")
        assert caught.value.adapter == "cold-3"

    def test_one_that_stays_where_it_is_ends_it_with_where_and_why(self, peer, gateway, adapters):
        peer.put(added(peer, adapters[:2]), "engine")
        gateway.stuck["demo:cold-1@1"] = "in_use"
        with pytest.raises(NotPut) as caught:
            peer.put(adapters[:2], "disk")
        assert (caught.value.adapter, caught.value.wanted) == ("demo:cold-1@1", "disk")
        assert "engine" in caught.value.seen and "in_use" in caught.value.seen

    def test_one_that_never_arrives_leaves_no_directive_behind(self, peer, gateway, adapters):
        gateway.broken = {"demo:cold-0@1"}
        with pytest.raises(NotPut, match="it is in remote"):
            peer.put(added(peer, adapters[:1]), "engine")
        assert gateway.directives == {}

    def test_a_replica_that_is_late_to_tell_is_waited_for(self, peer, gateway, adapters):
        added(peer, adapters[:1])
        gateway.silent = 5
        peer.put(adapters[:1], "disk")
        assert gateway.tiers["demo:cold-0@1"] == "disk"


class TestChanging:
    def test_a_version_is_asked_for_by_its_number(self, peer, adapters):
        added(peer, adapters[:1])
        assert peer.version(adapters[0]) == 1
        assert peer.model(adapters[0]) == "demo:cold-0@1"
        assert peer.model(adapters[0], alias="production") == "demo:cold-0"
        assert peer.model(adapters[0], alias="canary") == "demo:cold-0@canary"

    def test_other_content_under_a_name_is_another_version(self, peer, adapters):
        one, other = added(peer, adapters[:1])[0], adapters[1]
        peer.republish(one, other)
        assert peer.version(replace(other, name=one.name)) == 2
        assert peer.model(one) == "demo:cold-0@1"

    def test_a_promotion_says_how_long_the_move_alone_took(self, peer, adapters):
        added(peer, adapters[:1])
        assert peer.promote(adapters[0], adapters[1]) == 1.5

    def test_what_this_gateway_has_not_seen_is_looked_for(self, peer, gateway, adapters):
        peer.add(adapters[0])
        assert gateway.asked == ["POST publish", "POST refresh"]

    def test_a_path_in_the_store_leads_to_its_adapter(self, peer, adapters):
        added(peer, adapters[:2])
        assert peer.adapter_of("/bench/registry/blobs/d-cold-1-1/adapter_model.safetensors") == "cold-1"
        assert peer.adapter_of("/bench/registry/blobs/unknown/adapter_model.safetensors") is None

    def test_an_eviction_waits_for_requests_and_then_says_why_not(self, peer, gateway, adapters):
        peer.put(added(peer, adapters[:1]), "engine")
        gateway.stuck["demo:cold-0@1"] = "in_use"
        with pytest.raises(NotPut, match="in_use"):
            peer.evict(adapters[0], "remote")

    def test_what_the_server_refuses_is_told_in_its_words(self, adapters):
        refusing = httpx2.MockTransport(lambda request: httpx2.Response(422, text="all-zero B"))
        with pytest.raises(httpx2.HTTPStatusError, match="422: all-zero B"):
            LoraMux("http://gateway", "demo", http=httpx2.Client(transport=refusing)).add(adapters[0])


class TestStock:
    @pytest.fixture
    def stock(self) -> Stock:
        return Stock("stock", "http://nowhere", "demo", SLOTS)

    def test_only_what_it_has_never_seen_is_in_the_store(self, stock, adapters):
        assert stock.needs_fresh("remote")
        stock.put(adapters[:2], "remote")
        with pytest.raises(NotPut, match="used before"):
            stock.put(adapters[1:], "remote")

    def test_it_has_no_disk_that_it_tells_of(self, stock, adapters):
        assert not stock.can_put("disk")
        with pytest.raises(NotPut):
            stock.put(adapters, "disk")

    def test_more_than_its_slots_do_not_fit(self, stock, adapters):
        with pytest.raises(NotPut, match="3 places"):
            stock.put(adapters, "engine")

    def test_it_gives_nothing_up(self, stock, adapters):
        with pytest.raises(CannotDo):
            stock.evict(adapters[0], "remote")

    def test_one_that_is_attached_takes_adapters_where_it_looks_for_them(self, stock, adapters):
        with pytest.raises(CannotDo, match="--adapters-at"):
            stock.add(adapters[0])
        s3 = Uploads()
        Stock("stock", "http://there", "demo", SLOTS, AdapterPath(s3, "ours", "some/loras")).add(adapters[0])
        assert sorted(s3.keys) == sorted(("ours", f"some/loras/{adapters[0].name}/{file}") for file in (CONFIG, WEIGHTS))

    @pytest.mark.parametrize("url", ["https://bucket/prefix", "s3://bucket", "s3://bucket/", "s3:///prefix"])
    def test_what_is_no_path_of_adapters_is_refused_with_the_form(self, url):
        with pytest.raises(NotStarted, match="s3://bucket/prefix"):
            attached("stock", "http://there", "demo", adapters_at=url)


@dataclass
class Uploads:
    """An S3 client that only notes what is uploaded."""

    keys: list[tuple[str, str]] = field(default_factory=list)

    def upload_file(self, file: str, bucket: str, key: str) -> None:
        assert Path(file).exists()
        self.keys.append((bucket, key))


class TestVLLM:
    @pytest.fixture
    def vllm(self, tmp_path: Path) -> VLLM:
        (tmp_path / "resolved").mkdir()
        return VLLM("http://nowhere", Base("demo", "/models/base"), SLOTS, tmp_path / "resolved")

    def test_an_adapter_lies_in_a_folder_of_its_name_for_this_base(self, vllm, adapters, tmp_path):
        vllm.add(adapters[0])
        assert json.loads((tmp_path / "resolved/cold-0" / CONFIG).read_text()) == {"base_model_name_or_path": "/models/base"}
        assert (tmp_path / "resolved/cold-0" / WEIGHTS).read_bytes() == b"\0"

    def test_other_content_takes_the_folder_over(self, vllm, adapters, tmp_path):
        vllm.add(adapters[0])
        vllm.republish(adapters[0], adapters[1])
        assert (tmp_path / "resolved/cold-0" / WEIGHTS).read_bytes() == b"\1"
        assert [path.name for path in (tmp_path / "resolved").iterdir()] == ["cold-0"]

    def test_it_has_a_disk_for_what_it_has_never_seen_and_no_store(self, vllm, adapters):
        assert [tier for tier in ("remote", "disk", "engine") if vllm.can_put(tier)] == ["disk", "engine"]
        vllm.put(adapters[:1], "disk")
        with pytest.raises(NotPut, match="used before"):
            vllm.put(adapters[:1], "disk")

    def test_engine_arguments_become_flags(self):
        engine = {"enable_lora": True, "enforce_eager": False, "max_loras": 4, "limit_mm_per_prompt": {"image": 1}}
        assert flags_of(engine) == [
            "--enable-lora",
            "--no-enforce-eager",
            *("--max-loras", "4"),
            *("--limit-mm-per-prompt", '{"image": 1}'),
        ]


def test_a_server_that_runs_elsewhere_is_attached_by_its_address():
    peer = attached("loramux", "http://there:8000/v1/", "base")
    assert (peer.url, peer.base, peer.pid, peer.processes()) == ("http://there:8000", "base", None, {})
    with pytest.raises(NotStarted, match="can't be attached"):
        attached("vllm", "http://there:8000", "base")


def test_loramux_is_given_the_base_and_the_engine_as_they_are():
    settings = settings_of(Base("b", "s", "gpu", {"X": "1"}), "http://store", {"max_loras": 2}, "/cache", 3)
    served = {"id": "b", "source": "s", "accelerator": "gpu", "engine": {"max_loras": 2}, "env": {"X": "1"}, "replicas": 3}
    assert settings["bases"] == [served]
    assert settings["registry"]["endpoint"] == "http://store"
