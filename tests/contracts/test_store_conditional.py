"""The probe tells a store that keeps its promises from one that only says yes; the marker refuses the latter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest

from adapters import errors
from adapters.registry import codec
from adapters.registry.marker import Marker
from adapters.store import Listed, Object, Store, open_store
from adapters.store.conditional import ConditionalWrites, probe
from tests import stub_s3
from tests.fake_store import FakeStore
from tests.stub_s3 import StubS3

ALL_KEPT = ConditionalWrites(True, True, True, True, True, True)


class Careless(FakeStore):
    """A store that breaks the promises it is told to break."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = broken
        self.stale: Object | None = None

    async def create(self, key: str, data: bytes) -> str:
        return await (super().put(key, data) if "create" in self.broken else super().create(key, data))

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        there = key in self.objects
        if ("old etag" in self.broken and there) or ("gone" in self.broken and not there):
            return await super().put(key, data)
        return await super().replace(key, data, etag)

    async def get(self, key: str) -> Object:
        found = await super().get(key)
        if "stale" in self.broken and key.startswith("doctor/"):
            return Object(b"what was there before", found.etag)
        return found

    async def list(self, prefix: str) -> AsyncIterator[Listed]:
        if "late listing" not in self.broken:
            async for row in super().list(prefix):
                yield row

    async def delete(self, key: str) -> None:
        if "keeps" not in self.broken:
            await super().delete(key)


class Overtaken(FakeStore):
    """Somebody else's marker comes in the moment before the first one is created."""

    async def create(self, key: str, data: bytes) -> str:
        if key == "registry.json":
            await super().put(key, data)
        return await super().create(key, data)


@pytest.fixture
def stub() -> Iterator[StubS3]:
    with StubS3() as server:
        yield server


class TestProbe:
    async def test_of_every_store_of_ours(self, store: Store) -> None:
        assert await probe(store) == ALL_KEPT

    async def test_leaves_nothing(self, store: Store) -> None:
        await probe(store)
        assert [row.key async for row in store.list("")] == []

    @pytest.mark.parametrize(
        ("broken", "promise"),
        [
            ("create", "create_refused_when_taken"),
            ("old etag", "replace_refused_with_old_etag"),
            ("gone", "replace_refused_when_gone"),
            ("stale", "read_after_write"),
            ("late listing", "list_after_write"),
        ],
    )
    async def test_names_the_promise_that_was_broken(self, broken: str, promise: str) -> None:
        store = Careless(broken)
        found = await probe(store)
        assert found.broken == (promise,)
        assert not found.honoured
        assert store.objects == {}

    async def test_of_a_store_that_does_not_delete(self) -> None:
        found = await probe(Careless("keeps"))
        assert (found.delete, found.honoured) == (False, True)

    async def test_of_a_publisher_who_may_not_delete(self, stub: StubS3) -> None:
        stub.answer(stub_s3.ACCESS_DENIED, method="DELETE")
        found = await probe(open_store(stub.settings()))
        assert (found.delete, found.honoured) == (False, True)

    async def test_of_a_look_alike_on_the_wire(self, stub: StubS3) -> None:
        stub.ignores_conditions = True
        found = await probe(open_store(stub.settings()))
        assert set(found.broken) == {"create_refused_when_taken", "replace_refused_with_old_etag", "replace_refused_when_gone"}
        assert stub.objects == {}

    async def test_of_a_store_as_aws(self, stub: StubS3) -> None:
        assert await probe(open_store(stub.settings())) == ALL_KEPT

    async def test_does_not_take_trouble_for_a_broken_promise(self, stub: StubS3) -> None:
        for answer, error in ((stub_s3.SLOW_DOWN, errors.StoreThrottled), (stub_s3.ACCESS_DENIED, errors.StoreDenied)):
            stub.answer(answer, method="PUT")
            with pytest.raises(error):
                await probe(open_store(stub.settings()))


class TestMarker:
    async def test_of_a_new_registry_is_written_once_the_store_was_asked(self, store: Store) -> None:
        await Marker(store).ensure()
        marker = json.loads((await store.get("registry.json")).data)
        assert marker["schema_version"] == codec.SCHEMA_VERSION
        assert marker["conditional_writes"]["checked_at"].startswith("20")
        assert [row.key async for row in store.list("")] == ["registry.json"]

    async def test_costs_one_read_in_a_process_once_it_is_there(self) -> None:
        store = FakeStore()
        await Marker(store).ensure()
        store.calls.clear()
        marker = Marker(store)
        for _ in range(3):
            await marker.ensure()
        assert store.calls == {("get", "registry.json"): 1}

    async def test_is_not_written_where_conditions_are_ignored(self, stub: StubS3) -> None:
        stub.ignores_conditions = True
        marker = Marker(open_store(stub.settings()))
        for _ in range(2):
            with pytest.raises(errors.StoreMisconfigured) as caught:
                await marker.ensure()
            assert caught.value.reason == "conditional_writes_ignored"
            assert caught.value.hint
        assert stub.objects == {}

    async def test_of_two_who_come_first_is_one(self) -> None:
        store = Overtaken()
        await Marker(store).ensure()
        assert list(store.objects) == ["registry.json"]

    async def test_of_a_newer_release_is_refused(self) -> None:
        store = FakeStore()
        await store.put("registry.json", b'{"schema_version": 99}')
        with pytest.raises(errors.StoreError) as caught:
            await Marker(store).ensure()
        assert (caught.value.reason, caught.value.value) == ("schema_too_new", 99)

    async def test_that_cannot_be_read_is_asked_for_again(self) -> None:
        store = FakeStore()
        marker = Marker(store)
        store.fail(errors.StoreUnreachable("down"))
        with pytest.raises(errors.StoreUnreachable):
            await marker.ensure()
        await marker.ensure()
        assert "registry.json" in store.objects
