"""The publisher: exports become versions once, whatever happens to store, disk and process; the run never notices."""

from __future__ import annotations

import asyncio
import errno
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import training.publishing.publisher as publisher_module
import training.publishing.versions as versions_module
from adapters.cli import waiting
from adapters.errors import StoreNoConnection, StoreUnreachable
from adapters.names import AdapterRef
from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry
from adapters.types import By, Head, Manifest
from tests.adapter_folders import TEXT, plain
from tests.exported_runs import ALIAS, BASE, NAME, Told, export, origin, saved, target, wait_until
from tests.fake_store import FakeStore
from training.publishing import Judged, Pauses, Published, Publisher, PublishRefused, PublishTrouble
from training.publishing.gate import METRIC

SOON = Pauses(0.01, 0.02)


class Registered:
    """A registry in memory, asked behind the publisher's back."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.registry = Registry(self.store)

    def do(self, work: Any) -> Any:
        return asyncio.run(work)

    @property
    def head(self) -> Head:
        return self.do(self.registry.head(BASE, NAME))

    def manifests(self) -> list[Manifest]:
        numbers = self.do(self.registry.versions(BASE, NAME))
        return [self.do(self.registry.manifest(AdapterRef(BASE, NAME, number))) for number in numbers]

    def publish_by_hand(self, folder: Path, *, promote: str | None = None, **said: Any) -> int:
        published = self.do(publish_folder(self.registry, Publication(BASE, NAME, folder, promote=promote, **said)))
        return published.ref.version


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for gateways that are not there, nor for a second look at files that nobody writes."""
    monkeypatch.setattr(waiting, "TAKEN_WITHIN_S", 0.0)
    monkeypatch.setattr(publisher_module, "LOOK_AGAIN_S", 0.0)


@pytest.fixture
def gateway(_hurry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is time for a gateway to take a move."""
    monkeypatch.setattr(waiting, "TAKEN_WITHIN_S", 60.0)


@pytest.fixture
def registered() -> Registered:
    return Registered()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def start(registered: Registered, told: Told) -> Iterator[Any]:
    """Starts publishers on the registry; those that a test leaves open are closed after it."""
    started: list[Publisher] = []

    def run(alias: str | None = ALIAS, **others: Any) -> Publisher:
        from_run = others.pop("origin", origin())
        started.append(Publisher(lambda: Registry(registered.store), target(alias, **others), from_run, told, pauses=SOON))
        return started[-1]

    yield run
    registered.store.heal()
    for publisher in started:
        publisher.close(0)


class TestVersions:
    def test_an_export_becomes_a_version_with_all_that_is_known_of_it(self, start, registered, tmp_path):
        publisher = start(origin=origin(evaluation={"set": "easy-64", "decoding": "sampled"}))
        publisher.offer(saved(export(tmp_path, 20), 0.75, loss=0.5))
        assert publisher.close(20) == ()
        (manifest,) = registered.manifests()
        assert manifest.metrics == {METRIC: 0.75, "loss": 0.5}
        assert manifest.who == "trainer"
        assert manifest.source | {"export_digest": ""} == {
            "kind": "trained",
            "run": "run-a",
            "step": 20,
            "spec_digest": "d" * 64,
            "base_digest": "b" * 64,
            "code_revision": "c" * 40,
            "evaluation": {"set": "easy-64", "decoding": "sampled"},
            "export_digest": "",
        }

    def test_the_version_holds_the_very_numbers_that_were_evaluated(self, start, registered, tmp_path):
        folder = export(tmp_path, 1)
        start().offer(saved(folder))
        wait_until(lambda: registered.do(registered.registry.versions(BASE, NAME)))
        (manifest,) = registered.manifests()
        weights = next(file for file in manifest.files if file.name.endswith(".safetensors"))
        assert weights.size_bytes > 4 * sum(tensor.size for tensor in plain(seed=1).tensors.values())

    def test_metrics_that_are_no_numbers_keep_no_adapter_from_being_a_version(self, start, registered, tmp_path):
        publisher = start()
        publisher.offer(saved(export(tmp_path, 1), 0.75, loss=math.nan, kl=math.inf))
        publisher.close(20)
        assert registered.manifests()[0].metrics == {METRIC: 0.75}

    def test_an_offer_twice_is_one_version(self, start, registered, told, tmp_path):
        publisher, folder = start(), export(tmp_path, 1)
        publisher.offer(saved(folder, 0.75))
        told.wait(Judged)
        publisher.offer(saved(folder, 0.75))
        publisher.close(20)
        assert len(registered.manifests()) == 1
        assert len(told.of(Judged)) == 1

    def test_equal_content_of_two_steps_is_one_version(self, start, registered, tmp_path):
        publisher = start()
        for step in (1, 2):
            publisher.offer(saved(export(tmp_path, step, seed=5), 0.75))
        publisher.close(20)
        assert [manifest.source["step"] for manifest in registered.manifests()] == [1]

    def test_a_base_that_refuses_ends_that_export_alone(self, start, registered, told, tmp_path):
        registered.do(registered.registry.put_base(replace(TEXT, max_rank=2)))
        publisher = start()
        publisher.offer(saved(export(tmp_path, 1), 0.75))
        refused = told.wait(PublishRefused)
        assert (refused.step, refused.reason) == (1, "rank_too_large")
        assert publisher.close(20) == ()
        assert publisher.metrics()["publish/refused"] == 1

    def test_an_export_that_is_gone_is_said_to_be_gone(self, start, told, tmp_path):
        publisher, folder = start(), export(tmp_path, 1)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        publisher.offer(saved(folder, 0.75))
        assert publisher.close(20) == ()
        assert told.of(PublishRefused)


class TestTrouble:
    def test_a_dead_store_holds_up_nobody_and_is_tried_until_it_lives(self, start, registered, told, tmp_path):
        registered.store.fail(StoreNoConnection("no connection"), times=math.inf)
        publisher = start()
        for step in (1, 2, 3):
            publisher.offer(saved(export(tmp_path, step), step / 4))
        told.wait(PublishTrouble, 1)
        wait_until(lambda: publisher.metrics()["publish/failed_attempts"] > 20)
        assert publisher.metrics()["publish/pending"] == 3
        registered.store.heal()
        for step in (1, 2, 3):
            told.wait(Judged, step)
        assert publisher.close(20) == ()
        assert [manifest.source["step"] for manifest in registered.manifests()] == [1, 2, 3]
        assert registered.head.aliases == {ALIAS: 3}

    def test_an_outage_is_told_in_a_few_events_however_long_it_lasts(self, start, registered, told, tmp_path):
        registered.store.fail(StoreNoConnection("no connection"), times=math.inf)
        publisher = start()
        publisher.offer(saved(export(tmp_path, 1), 0.75))
        wait_until(lambda: publisher.metrics()["publish/failed_attempts"] >= 30)
        assert [event.attempts for event in told.of(PublishTrouble)][:5] == [1, 2, 4, 8, 16]

    def test_what_is_left_at_the_end_is_told_and_stays(self, start, registered, tmp_path):
        registered.store.fail(StoreNoConnection("no connection"), times=math.inf)
        publisher, folder = start(), export(tmp_path, 7)
        publisher.offer(saved(folder, 0.75))
        (left,) = publisher.close(0.2)
        assert (left.step, left.folder, left.reason) == (7, str(folder), "no_connection")
        assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]

    def test_the_next_scan_publishes_what_was_left_with_its_metrics(self, start, registered, told, tmp_path):
        registered.store.fail(StoreNoConnection("no connection"), times=math.inf)
        first = start()
        first.offer(saved(export(tmp_path, 7), 0.75))
        told.wait(PublishTrouble)
        first.close(0)
        registered.store.heal()
        second = start(origin=origin("resumed"))
        second.scan(tmp_path)
        assert second.close(20) == ()
        (manifest,) = registered.manifests()
        assert (manifest.metrics, manifest.source["run"]) == ({METRIC: 0.75}, "run-a")
        assert registered.head.aliases == {ALIAS: 1}

    def test_a_lost_answer_makes_no_second_version(self, start, registered, told, tmp_path):
        registered.store.fail(StoreUnreachable("cut off"), method="create", key_part="manifest.json")
        publisher = start()
        publisher.offer(saved(export(tmp_path, 1), 0.75))
        publisher.close(20)
        assert len(registered.manifests()) == 1

    def test_a_full_disk_is_waited_out(self, start, registered, told, tmp_path, monkeypatch):
        publish, failures = versions_module.publish_folder, iter([OSError(errno.ENOSPC, "No space left on device")] * 3)

        async def on_a_full_disk(*arguments: Any) -> Any:
            if (error := next(failures, None)) is not None:
                raise error
            return await publish(*arguments)

        monkeypatch.setattr(versions_module, "publish_folder", on_a_full_disk)
        publisher = start()
        publisher.offer(saved(export(tmp_path, 1), 0.75))
        assert told.wait(PublishTrouble).reason == "OSError"
        assert publisher.close(20) == ()
        assert len(registered.manifests()) == 1

    def test_a_defect_of_our_own_reaches_no_run(self, start, registered, told, tmp_path, monkeypatch):
        publish, failures = versions_module.publish_folder, iter([KeyError("a defect")])

        async def with_a_defect(*arguments: Any) -> Any:
            if (error := next(failures, None)) is not None:
                raise error
            return await publish(*arguments)

        monkeypatch.setattr(versions_module, "publish_folder", with_a_defect)
        publisher = start()
        publisher.offer(saved(export(tmp_path, 1), 0.75))
        assert told.wait(PublishTrouble).reason == "KeyError"
        assert publisher.close(20) == ()

    def test_a_run_that_cannot_be_told_is_published_all_the_same(self, registered, tmp_path):
        def deaf(event: Any) -> None:
            raise OSError("the event log is gone")

        publisher = Publisher(lambda: Registry(registered.store), target(), origin(), deaf, pauses=SOON)
        publisher.offer(saved(export(tmp_path, 1), 0.75))
        assert publisher.close(20) == ()
        assert registered.head.aliases == {ALIAS: 1}

    def test_what_is_offered_after_the_end_is_left_to_the_next_scan(self, start, registered, tmp_path):
        publisher = start()
        publisher.close(1)
        publisher.offer(saved(export(tmp_path, 1), 0.75))
        assert publisher.close(1) == ()
        assert registered.do(registered.registry.versions(BASE, NAME)) == []


class TestPromotion:
    def offered(self, publisher: Publisher, told: Told, folder: Path, rate: float | None) -> Judged:
        count = len(told.of(Judged)) + 1
        publisher.offer(saved(folder, rate))
        return told.wait(Judged, count=count)

    def test_better_versions_move_the_alias_and_worse_ones_do_not(self, start, registered, told, tmp_path):
        publisher = start()
        moved = [
            self.offered(publisher, told, export(tmp_path, step), rate).promoted
            for step, rate in enumerate((0.3, 0.6, 0.55, 0.6, 0.9), 1)
        ]
        assert moved == [False, True, False, False, True]
        assert registered.head.aliases == {ALIAS: 5}

    def test_without_an_alias_nothing_is_judged(self, start, registered, told, tmp_path):
        publisher = start(alias=None)
        publisher.offer(saved(export(tmp_path, 1), 1.0))
        publisher.close(20)
        assert registered.head.aliases == {}
        assert told.of(Judged) == []

    def test_the_verdict_stays_with_the_version(self, start, registered, told, tmp_path):
        publisher = start()
        self.offered(publisher, told, export(tmp_path, 1), 0.3)
        self.offered(publisher, told, export(tmp_path, 2), 0.6)
        assert registered.head.tags == {
            1: {"gate": "held:below_minimum", "gate-score": "0.3"},
            2: {"gate": "promoted", "gate-score": "0.6"},
        }

    def test_what_somebody_rolled_back_stays_rolled_back(self, start, registered, told, tmp_path):
        publisher = start()
        for step, rate in ((1, 0.6), (2, 0.9)):
            self.offered(publisher, told, export(tmp_path, step), rate)
        registered.do(registered.registry.rollback(BASE, NAME, ALIAS))
        publisher.close(20)
        again = start()
        again.scan(tmp_path)
        again.close(20)
        assert registered.head.aliases == {ALIAS: 1}

    def test_a_version_that_was_evaluated_only_later_is_judged_again(self, start, registered, told, tmp_path):
        publisher, folder = start(), export(tmp_path, 1)
        assert self.offered(publisher, told, folder, None).codes == ("not_evaluated",)
        assert self.offered(publisher, told, folder, 0.7).promoted

    def test_and_later_versions_are_held_against_what_was_said_then(self, start, registered, told, tmp_path):
        publisher, folder = start(), export(tmp_path, 1)
        self.offered(publisher, told, folder, None)
        self.offered(publisher, told, folder, 0.7)
        assert self.offered(publisher, told, export(tmp_path, 2), 0.6).codes == ("not_better",)
        assert self.offered(publisher, told, export(tmp_path, 3), 0.8).promoted

    def test_a_version_from_elsewhere_stays_until_somebody_vouches_for_it(self, start, registered, told, tmp_path):
        version = registered.publish_by_hand(plain(seed=90).write(tmp_path / "by-hand"), promote=ALIAS)
        publisher = start()
        assert self.offered(publisher, told, export(tmp_path, 1), 0.9).codes == ("unknown",)
        registered.do(registered.registry.tag(AdapterRef(BASE, NAME, version), {"gate-score": "0.8"}))
        assert self.offered(publisher, told, export(tmp_path, 2), 0.9).promoted

    def test_a_verdict_whose_note_was_lost_is_noted_later_and_moves_nothing_again(self, start, registered, told, tmp_path):
        lost = registered.store.fail(StoreNoConnection("no connection"), method="replace", key_part="head.json", at=2)
        publisher = start()
        assert self.offered(publisher, told, export(tmp_path, 1), 0.6).promoted
        assert lost.seen == 3
        assert [row.kind for row in registered.head.history] == ["promote"]

    def test_a_protected_alias_stays_and_the_reason_is_told(self, start, registered, told, tmp_path):
        publisher = start()
        self.offered(publisher, told, export(tmp_path, 1), 0.6)
        registered.do(registered.registry.protect(BASE, NAME, ALIAS))
        assert self.offered(publisher, told, export(tmp_path, 2), 0.9).codes == ("protected",)

    def test_a_lost_race_is_judged_again_against_the_winner(self, start, registered, told, tmp_path, monkeypatch):
        rival = registered.publish_by_hand(plain(seed=90).write(tmp_path / "by-hand"), metrics={METRIC: 0.95})
        promote = Registry.promote

        async def after_the_rival(registry: Registry, base: str, name: str, alias: str, version: int, by: By) -> Head:
            if version != rival:
                await promote(registry, base, name, alias, rival)
            return await promote(registry, base, name, alias, version, by)

        monkeypatch.setattr(Registry, "promote", after_the_rival)
        publisher = start()
        judged = self.offered(publisher, told, export(tmp_path, 1), 0.9)
        assert judged.codes == ("not_better",)
        assert registered.head.aliases == {ALIAS: rival}

    def test_an_alias_that_has_users_waits_for_its_replicas(self, gateway, start, registered, told, tmp_path):
        publisher = start()
        self.offered(publisher, told, export(tmp_path, 1), 0.6)
        publisher.offer(saved(export(tmp_path, 2), 0.9))
        wait_until(lambda: ALIAS in registered.head.pending)
        (move,) = registered.head.pending.values()
        registered.do(registered.registry.take_move(BASE, NAME, ALIAS, move.id, "gateway-1"))
        registered.do(registered.registry.finish_move(BASE, NAME, ALIAS, move.id))
        assert told.wait(Judged, 2).promoted
        assert registered.head.aliases == {ALIAS: 2}

    def test_a_version_that_no_replica_can_load_is_held(self, gateway, start, registered, told, tmp_path):
        publisher = start()
        self.offered(publisher, told, export(tmp_path, 1), 0.6)
        publisher.offer(saved(export(tmp_path, 2), 0.9))
        wait_until(lambda: ALIAS in registered.head.pending)
        (move,) = registered.head.pending.values()
        registered.do(registered.registry.fail_move(BASE, NAME, ALIAS, move.id, "the engine refused it"))
        judged = told.wait(Judged, 2)
        assert judged.codes == ("not_served",)
        assert "the engine refused it" in judged.reasons[0]
        assert registered.head.aliases == {ALIAS: 1}


class TestScan:
    def test_every_export_that_no_version_holds_becomes_one_in_order(self, start, registered, tmp_path):
        for step in (10, 2, 30):
            export(tmp_path, step)
        publisher = start(alias=None)
        publisher.scan(tmp_path)
        assert publisher.close(20) == ()
        assert [manifest.source["step"] for manifest in registered.manifests()] == [2, 10, 30]

    def test_a_second_scan_sends_nothing(self, start, registered, tmp_path):
        export(tmp_path, 1)
        for _ in range(2):
            publisher = start(alias=None)
            publisher.scan(tmp_path)
            publisher.close(20)
        assert registered.store.count("create", "manifest.json") == 1

    def test_a_version_that_was_collected_is_not_brought_back(self, start, registered, tmp_path):
        publisher = start(alias=None)
        for step in (1, 2):
            publisher.offer(saved(export(tmp_path, step)))
        publisher.close(20)
        registered.do(registered.registry.collect(AdapterRef(BASE, NAME, 1)))
        again = start(alias=None)
        again.scan(tmp_path)
        again.close(20)
        assert set(registered.head.collected) == {1}

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_an_export_that_is_half_written_in_place_waits(self, start, registered, tmp_path, name):
        whole = (export(tmp_path, 1) / name).read_bytes()
        (tmp_path / "global_step_1" / "policy" / name).write_bytes(whole[: len(whole) // 2])
        publisher = start(alias=None)
        publisher.scan(tmp_path)
        assert publisher.close(20) == ()
        assert registered.do(registered.registry.versions(BASE, NAME)) == []

    def test_checkpoints_and_drafts_are_no_exports(self, start, registered, tmp_path):
        plain(seed=1).write(tmp_path / "global_step_1" / "policy" / "lora_adapter")
        plain(seed=2).write(tmp_path / ".global_step_2" / "policy")
        plain(seed=3).write(tmp_path / "global_step_3" / "policy.draft")
        publisher = start(alias=None)
        publisher.scan(tmp_path)
        publisher.close(20)
        assert registered.do(registered.registry.versions(BASE, NAME)) == []

    def test_a_record_that_tells_of_other_content_is_not_believed(self, start, registered, told, tmp_path):
        publisher = start()
        publisher.offer(saved(export(tmp_path, 1, seed=1), 0.9))
        told.wait(Judged)
        publisher.close(20)
        export(tmp_path, 1, seed=2)
        again = start()
        again.scan(tmp_path)
        again.close(20)
        assert [manifest.metrics for manifest in registered.manifests()] == [{METRIC: 0.9}, {}]

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"export_digest": 3}', "null"])
    def test_a_record_that_is_damaged_is_no_obstacle(self, start, registered, tmp_path, text):
        folder = export(tmp_path, 1)
        (folder.parent / "saved.json").write_text(text)
        publisher = start(alias=None)
        publisher.scan(tmp_path)
        publisher.close(20)
        assert len(registered.manifests()) == 1

    def test_a_folder_that_is_not_there_is_no_trouble(self, start, tmp_path):
        publisher = start()
        publisher.scan(tmp_path / "nothing")
        assert publisher.close(20) == ()

    def test_a_watch_finds_what_comes_later(self, start, registered, told, tmp_path):
        publisher = start(alias=None)
        publisher.watch(tmp_path, interval_s=0.02, settle_s=0.0)
        for step in (1, 2):
            export(tmp_path, step)
            told.wait(Published, step)
        publisher.close(20)
        assert [manifest.source["step"] for manifest in registered.manifests()] == [1, 2]

    def test_a_watch_takes_what_grows_in_place_only_when_it_is_whole(self, start, registered, told, tmp_path):
        folder = export(tmp_path, 1)
        whole = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(whole[:100])
        publisher = start(alias=None)
        publisher.watch(tmp_path, interval_s=0.02, settle_s=0.0)
        export(tmp_path, 2)
        told.wait(Published, 2)
        (folder / "adapter_model.safetensors").write_bytes(whole)
        told.wait(Published, 1)
        publisher.close(20)
        assert len(registered.manifests()) == 2

    def test_what_is_known_of_an_export_lies_beside_it(self, start, told, tmp_path):
        publisher, folder = start(), export(tmp_path, 1)
        publisher.offer(saved(folder, 0.75, loss=math.nan))
        told.wait(Judged)
        row = json.loads((folder.parent / "saved.json").read_text())
        assert (row["step"], row["run"], row["metrics"]) == (1, "run-a", {METRIC: 0.75})
