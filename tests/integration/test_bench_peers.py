"""The harness's own LoraMux: adapters are where it puts them, and the store is as narrow as it says."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from loadtests import peers
from loadtests.material import Adapter, Base, Material, Source, Supply, engine_for
from loadtests.peers import NotPut, Peer
from loadtests.scenario import Pool, StoreShape
from loadtests.servers import s3_server
from loadtests.shaping import MIB, Store, shaped

POOLS = {"small": Pool(count=3), "large": Pool(count=1, ranks=(64,)), "spare": Pool(count=2)}
TIMES = 3
MIB_PER_S = 0.5
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def material(demo_base: Path, artifacts: Path, sentences: dict[str, str], tmp_path_factory) -> Material:
    sources = tuple(Source(artifacts / "adapters" / name, said) for name, said in sentences.items())
    supply = Supply(tmp_path_factory.mktemp("variants"), sources)
    return Material(Base("demo", str(demo_base)), supply.pools(POOLS), supply)


@pytest.fixture(scope="module")
def running(material: Material, tmp_path_factory) -> Iterator[tuple[Peer, Store]]:
    with ExitStack() as stack:
        endpoint, _ = stack.enter_context(s3_server())
        store = stack.enter_context(shaped(endpoint))
        folder = tmp_path_factory.mktemp("loramux")
        peer = stack.enter_context(peers.start("loramux", material.base, store, engine_for(POOLS, {}), folder))
        for adapter in (*material.pools["small"], *material.pools["large"]):
            peer.add(adapter)
        yield peer, store


@pytest.fixture
def peer(running: tuple[Peer, Store]) -> Peer:
    return running[0]


@pytest.fixture
def store(running: tuple[Peer, Store]) -> Iterator[Store]:
    yield running[1]
    running[1].shape(StoreShape())


def ask(peer: Peer, adapter: Adapter, alias: str | None = None) -> httpx2.Response:
    with httpx2.Client(trust_env=False, timeout=60) as http:
        body = HELLO | {"model": peer.model(adapter, alias=alias)}
        return http.post(f"{peer.url}/v1/chat/completions", json=body).raise_for_status()


def said(answer: httpx2.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


def stages_ms(answer: httpx2.Response) -> dict[str, float]:
    parts = (part.strip().split(";dur=") for part in answer.headers["server-timing"].split(","))
    return {name: float(took) for name, took in parts}


@pytest.mark.parametrize("tier", ["remote", "disk", "engine", "remote"])
def test_a_request_meets_every_adapter_in_the_tier_where_it_was_put(peer, material, tier):
    adapters = material.pools["small"]
    peer.put(adapters, tier)
    answers = [ask(peer, adapter) for adapter in adapters]
    assert [answer.headers["x-loramux-tier"] for answer in answers] == [tier] * len(adapters)
    assert [said(answer) for answer in answers] == [adapter.sentence for adapter in adapters]


def test_more_adapters_than_places_are_not_put_into_the_engine(peer, material):
    with pytest.raises(NotPut, match="4 places"):
        peer.put((*material.pools["small"], *material.pools["large"], *material.pools["small"]), "engine")


def test_a_higher_rank_answers_with_the_same_sentence(peer, material):
    (large,) = material.pools["large"]
    assert said(ask(peer, large)) == large.sentence


def test_a_read_at_the_store_is_told_with_its_adapter(peer, store, material):
    (large,) = material.pools["large"]
    peer.put([large], "remote")
    store.fetches()
    ask(peer, large)
    assert [(peer.adapter_of(fetch.path), fetch.bytes) for fetch in store.fetches()] == [(large.name, large.size_bytes)]


def test_half_the_bandwidth_moves_the_fetch_alone_by_bytes_over_bandwidth(peer, store, material):
    (large,) = material.pools["large"]

    def medians_ms(mib_per_s: float) -> dict[str, float]:
        """Of each stage, from a store of that bandwidth."""
        seen = []
        for _ in range(TIMES):
            store.shape(StoreShape())
            peer.put([large], "remote")
            store.shape(StoreShape(total_mib_per_s=mib_per_s))
            seen.append(stages_ms(ask(peer, large)))
        return {stage: statistics.median(one[stage] for one in seen) for stage in seen[0]}

    whole, half = medians_ms(MIB_PER_S), medians_ms(MIB_PER_S / 2)
    more_ms = 1e3 * large.size_bytes / MIB / MIB_PER_S
    assert half["fetch"] - whole["fetch"] == pytest.approx(more_ms, rel=0.1)
    assert whole["fetch"] == pytest.approx(more_ms, rel=0.1)
    others = whole.keys() - {"fetch", "relay"}  # relay holds all that follows it
    assert {stage: half[stage] - whole[stage] for stage in others} == dict.fromkeys(others, pytest.approx(0, abs=0.1 * more_ms))


def test_what_is_published_again_answers_at_once_and_a_promotion_answers_from_the_engine(peer, material):
    one, other = material.pools["small"][0], material.pools["small"][1]
    again, next_one = material.pools["spare"]
    peer.republish(one, again)
    assert said(ask(peer, one, alias="production")) == again.sentence
    peer.promote(other, next_one)
    promoted = ask(peer, other, alias="production")
    assert (said(promoted), promoted.headers["x-loramux-tier"]) == (next_one.sentence, "engine")


def test_every_part_of_it_is_found_among_the_processes(peer):
    assert {"gateway", "replica", "engine core", "engine worker"} <= set(peer.processes())
