"""Documents of earlier releases are read for ever; a newer schema upgrades them, and an older release says that it can't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters import errors
from adapters.names import AdapterRef
from adapters.registry import Registry, codec, layout
from adapters.registry.upgrading import upgrade
from adapters.types import AppliedRule, By, Head
from tests.fake_store import FakeStore
from tests.prepared import prepared

RECORDED = Path(__file__).parents[2] / "data" / "registry-v1"  # written by the release that had schema 1 first; never edit
BASE, NAME = "Qwen/Qwen3-VL-8B-Instruct", "team/maze"


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.json").read_bytes()


class TestRecorded:
    def test_manifest(self) -> None:
        manifest = codec.decode_manifest(recorded("manifest"))
        assert (manifest.ref, manifest.rank, manifest.size_bytes) == (AdapterRef(BASE, NAME, 2), 32, 174_655_948)
        assert (manifest.source["step"], manifest.metrics["solved"]) == (160, 0.96875)
        assert manifest.rules[0] == AppliedRule("remap-tower", 1008)

    def test_head(self) -> None:
        head = codec.decode_head(recorded("head"))
        assert (head.revision, head.aliases, head.retired) == (5, {"production": 1, "canary": 2}, {3})
        assert [row.kind for row in head.history] == ["promote", "promote", "rollback"]
        assert head.extra["pins"][0]["tier"] == "engine"
        assert (head.weights, head.protected, head.collected, head.tags) == ({}, frozenset(), {}, {})

    def test_base_contract(self) -> None:
        contract = codec.decode_contract(recorded("base"))
        assert (contract.max_rank, contract.tower, contract.serves_vision) == (64, "model.language_model", False)
        assert {(shape.in_features, shape.out_features, shape.experts) for shape in contract.modules.values()} == {
            (4096, 4096, None),
            (12288, 4096, None),
        }

    def test_index_shard(self) -> None:
        [entry] = codec.decode_entries(recorded("shard"))
        assert (entry.latest, entry.production, entry.weights) == (2, 1, {})
        assert entry.versions[3].retired and not entry.versions[3].collected


class TestNextSchema:
    """A pretended next schema that calls the aliases of a head `names` and adds a field to bases and rows."""

    @pytest.fixture
    async def store(self) -> FakeStore:
        """A registry that today's release wrote."""
        store = FakeStore()
        registry = Registry(store)
        for content in "ab":
            await registry.publish(BASE, NAME, prepared(content))
        await registry.promote(BASE, NAME, "production", 1)
        await registry.put_base(codec.decode_contract(recorded("base")))
        return store

    @pytest.fixture
    def _next(self, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def encode(head: Head, *, before=codec.encode_head) -> bytes:
            document = json.loads(before(head))
            document["names"] = document.pop("aliases")
            return json.dumps(document).encode()

        def decode(data: bytes, *, before=codec.decode_head) -> Head:
            document = codec._document(data, "head")
            document["aliases"] = document.pop("names")
            return before(json.dumps({**document, "schema_version": 2}).encode())

        def names(document: codec.Document) -> codec.Document:
            return {**{key: value for key, value in document.items() if key != "aliases"}, "names": document["aliases"]}

        monkeypatch.setattr(codec, "SCHEMA_VERSION", 2)
        monkeypatch.setattr(codec, "encode_head", encode)
        monkeypatch.setattr(codec, "decode_head", decode)
        monkeypatch.setitem(codec.UPGRADES, ("head", 1), names)

    @pytest.mark.usefixtures("_next")
    async def test_old_documents_are_upgraded_when_read_and_left_as_they_are(self, store: FakeStore) -> None:
        before = dict(store.objects)
        registry = Registry(store)
        assert (await registry.head(BASE, NAME)).aliases == {"production": 1}
        assert (await registry.entry(BASE, NAME)).production == 1
        assert store.objects == before

    @pytest.mark.usefixtures("_next")
    async def test_the_next_write_has_the_new_schema_and_manifests_stay(self, store: FakeStore) -> None:
        key = layout.head_key(BASE, NAME)
        manifests = {key: value for key, value in store.objects.items() if key.endswith("manifest.json")}
        await Registry(store).promote(BASE, NAME, "production", 2, By("ann"))
        document = json.loads(store.objects[key].data)
        assert (document["schema_version"], document["names"]) == (2, {"production": 2})
        assert manifests.items() <= store.objects.items()

    @pytest.mark.usefixtures("_next")
    async def test_an_upgrade_rewrites_all_but_manifests_once(self, store: FakeStore) -> None:
        registry = Registry(store)
        revision = (await registry.head(BASE, NAME)).revision
        report = await upgrade(registry)
        assert (report.heads_rewritten, report.bases_rewritten, report.shards_rewritten) == (1, 1, 0)
        versions = {key: json.loads(value.data)["schema_version"] for key, value in store.objects.items() if "blobs/" not in key}
        assert {version for key, version in versions.items() if "manifest" not in key} == {2}
        assert {version for key, version in versions.items() if "manifest" in key} == {1}
        head = await registry.head(BASE, NAME)
        assert (head.revision, head.aliases) == (revision, {"production": 1})
        again = await upgrade(registry)
        assert (again.heads_rewritten, again.bases_rewritten, again.shards_rewritten) == (0, 0, 0)
        assert (await registry.sweep(full=True)).repaired == ()

    async def test_an_older_release_refuses_by_name(
        self, store: FakeStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as newer:
            newer.setattr(codec, "SCHEMA_VERSION", 2)
            await upgrade(Registry(store))
        for read in (Registry(store).head(BASE, NAME), Registry(store).base(BASE), Registry(store).index.entry(BASE, NAME)):
            with pytest.raises(errors.StoreError, match="schema version 2; this release reads up to 1") as caught:
                await read
            assert caught.value.reason == "schema_too_new"
        assert (await Registry(store).manifest(AdapterRef(BASE, NAME, 1))).digest == prepared("a").digest

    @pytest.mark.usefixtures("_next")
    async def test_an_old_document_that_can_not_be_upgraded_is_corrupt(self, store: FakeStore) -> None:
        await store.put(layout.head_key(BASE, NAME), b'{"schema_version": 1}')
        with pytest.raises(errors.StoreError, match="no document of schema version 1") as caught:
            await Registry(store).head(BASE, NAME)
        assert caught.value.reason == codec.CORRUPT

    async def test_nothing_is_rewritten_without_need(self, store: FakeStore) -> None:
        before = dict(store.objects)
        report = await upgrade(Registry(store))
        assert (report.heads, report.bases) == (1, 1)
        assert store.objects == before
