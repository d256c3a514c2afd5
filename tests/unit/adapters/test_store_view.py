"""A process' picture of the registry over a store in trouble, through the real client: it serves on, and says how old it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from adapters import errors
from adapters.errors import StoreError
from adapters.names import parse_model_name
from adapters.registry import Registry, layout
from adapters.registry.view import RegistryView
from adapters.store import open_store
from tests import stub_s3
from tests.prepared import prepared
from tests.stub_s3 import Answer, StubS3, patience_s

BASE = "demo"

TROUBLES: dict[str, tuple[Answer, type[StoreError]]] = {
    "unreachable": (stub_s3.HANG_UP, errors.StoreUnreachable),
    "server error": (stub_s3.INTERNAL_ERROR, errors.StoreUnreachable),
    "timed_out": (stub_s3.SILENT, errors.StoreTimedOut),
    "cut_off": (stub_s3.CUT_IN_BODY, errors.StoreCutOff),
    "throttled": (stub_s3.SLOW_DOWN, errors.StoreThrottled),
    "denied": (stub_s3.ACCESS_DENIED, errors.StoreDenied),
    "credentials_expired": (stub_s3.EXPIRED_TOKEN, errors.StoreCredentialsExpired),
    "wrong_region": (stub_s3.WRONG_REGION, errors.StoreWrongRegion),
    "no_bucket": (stub_s3.NO_SUCH_BUCKET, errors.StoreNoBucket),
    "misconfigured": (Answer(404, b"<html>nginx</html>"), errors.StoreMisconfigured),
}


@pytest.fixture(scope="module")
def server() -> Iterator[StubS3]:
    with StubS3() as stub:
        yield stub


@pytest.fixture
def stub(server: StubS3) -> Iterator[StubS3]:
    server.objects.clear()
    yield server
    server.heal()


@pytest.fixture
async def registry(stub: StubS3, answer: Answer) -> Registry:
    """Two adapters with a production version each, in different shards."""
    registry = Registry(open_store(stub.settings(request_timeout_s=patience_s(answer))))
    for name in ("maze", "parrot"):
        await registry.publish(BASE, name, prepared(name))
    return registry


@pytest.fixture
async def view(registry: Registry) -> RegistryView:
    view = RegistryView(registry, poll_interval_s=0.01)
    await view.refresh()
    return view


def version_of(view: RegistryView, name: str) -> int:
    return view.resolve(parse_model_name(f"{BASE}:{name}@latest")).ref.version


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


each_trouble = pytest.mark.parametrize(("answer", "error"), TROUBLES.values(), ids=TROUBLES)


@each_trouble
async def test_no_trouble_takes_anything_from_the_picture(
    stub: StubS3, view: RegistryView, answer: Answer, error: type[StoreError]
) -> None:
    stub.answer(answer)
    with pytest.raises(error):
        await view.refresh()
    assert version_of(view, "maze") == 1
    assert (type(view.last_error), view.error_reason) == (error, error.default_reason)
    with pytest.raises(errors.ModelNotFound):
        view.resolve(parse_model_name(f"{BASE}:invented"))
    stub.heal()
    await view.refresh()
    assert view.error_reason is None


@each_trouble
async def test_polling_survives_and_the_age_grows(
    stub: StubS3, registry: Registry, view: RegistryView, answer: Answer, error: type[StoreError]
) -> None:
    polling = asyncio.create_task(view.run())
    stub.answer(answer)
    await until(lambda: isinstance(view.last_error, error))
    age_s = view.age_s
    await asyncio.sleep(0.05)
    assert view.age_s > age_s
    stub.heal()
    await registry.publish(BASE, "maze", prepared("new"))
    # a look is over a moment after what it brought can be seen
    await until(lambda: version_of(view, "maze") == 2 and view.error_reason is None)
    polling.cancel()


@each_trouble
async def test_a_shard_that_cannot_be_read_keeps_its_rows_and_the_others_move_on(
    stub: StubS3, registry: Registry, view: RegistryView, answer: Answer, error: type[StoreError]
) -> None:
    before = {row.key async for row in registry.store.list("index/")}
    for name in ("maze", "parrot"):
        await registry.publish(BASE, name, prepared(f"new {name}"))
    assert {row.key async for row in registry.store.list("index/")} == before
    broken = shard_of("maze")
    stub.answer(answer, method="GET", key=broken)
    with pytest.raises(error):
        await view.refresh()
    assert (version_of(view, "maze"), version_of(view, "parrot")) == (1, 2)
    stub.heal()
    await view.refresh()
    assert version_of(view, "maze") == 2


@each_trouble
async def test_nothing_is_not_found_before_the_first_picture(
    stub: StubS3, registry: Registry, answer: Answer, error: type[StoreError]
) -> None:
    view = RegistryView(registry, poll_interval_s=0.01)
    stub.answer(answer)
    with pytest.raises(error):
        await view.refresh()
    with pytest.raises(errors.StoreUnreachable):
        version_of(view, "maze")
    assert view.age_s is None


def shard_of(name: str) -> str:

    return layout.shard_key(layout.shard_of(BASE, name))
