"""The registry's writes over AWS' answers to conditional writes: lost races, lost answers and throttling, on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from adapters import errors
from adapters.registry import Registry
from adapters.store import open_store
from adapters.types import By
from tests import stub_s3
from tests.prepared import prepared
from tests.stub_s3 import Answer, StubS3, patience_s

BASE, NAME = "demo", "maze"

LOST_RACES = [stub_s3.CONDITIONAL_CONFLICT, stub_s3.OPERATION_ABORTED, stub_s3.PRECONDITION_FAILED, stub_s3.NO_SUCH_KEY]
LOST_ANSWERS = [replace(answer, written=True) for answer in (stub_s3.HANG_UP, stub_s3.SILENT)]
DOCUMENTS = ["manifest.json", "head.json", "index/"]

each_race = pytest.mark.parametrize("answer", LOST_RACES, ids=["409", "409 aborted", "412", "404"])
each_lost_answer = pytest.mark.parametrize("answer", LOST_ANSWERS, ids=["hang up", "silent"])
each_document = pytest.mark.parametrize("document", DOCUMENTS)


@pytest.fixture
def stub() -> Iterator[StubS3]:
    with StubS3() as server:
        yield server


@pytest.fixture
def registry(stub: StubS3, request: pytest.FixtureRequest) -> Registry:
    answer = request.node.callspec.params.get("answer", Answer())
    return Registry(open_store(stub.settings(request_timeout_s=patience_s(answer), retry_timeout_s=20)))


async def versions(registry: Registry) -> tuple[list[int], list[int]]:
    """What the truth and the index show."""
    row = await registry.index.entry(BASE, NAME)
    return await registry.versions(BASE, NAME), sorted(row.versions) if row else []


@each_race
@each_document
async def test_a_first_publication_that_lost_a_race_comes_to_its_end(
    stub: StubS3, registry: Registry, answer: Answer, document: str
) -> None:
    stub.answer(answer, method="PUT", key=document, times=1)
    done = await registry.publish(BASE, NAME, prepared())
    assert done.created
    assert await versions(registry) == ([done.ref.version], [done.ref.version])


@each_race
@pytest.mark.parametrize("document", ["head.json", "index/"])
async def test_a_promotion_that_lost_a_race_comes_to_its_end(
    stub: StubS3, registry: Registry, answer: Answer, document: str
) -> None:
    await registry.publish(BASE, NAME, prepared())
    stub.answer(answer, method="PUT", key=document, times=1)
    await registry.promote(BASE, NAME, "production", 1, By())
    assert (await registry.head(BASE, NAME)).aliases == {"production": 1}
    assert (await registry.index.entry(BASE, NAME)).aliases == {"production": 1}


@each_lost_answer
@each_document
async def test_a_publication_knows_its_own_writes_when_their_answers_are_lost(
    stub: StubS3, registry: Registry, answer: Answer, document: str
) -> None:
    stub.answer(answer, method="PUT", key=document, times=1)
    done = await registry.publish(BASE, NAME, prepared())
    assert (done.ref.version, done.created) == (1, True)
    assert await versions(registry) == ([1], [1])


@each_lost_answer
async def test_a_promotion_is_not_done_twice_when_its_answer_is_lost(stub: StubS3, registry: Registry, answer: Answer) -> None:
    await registry.publish(BASE, NAME, prepared())
    stub.answer(answer, method="PUT", key="head.json", times=1)
    head = await registry.promote(BASE, NAME, "production", 1, By())
    assert (head.revision, len(head.history)) == (2, 1)


@each_document
async def test_a_throttled_publication_waits_and_writes_once(stub: StubS3, registry: Registry, document: str) -> None:
    stub.answer(stub_s3.SLOW_DOWN, method="PUT", key=document, times=2)
    await registry.publish(BASE, NAME, prepared())
    assert await versions(registry) == ([1], [1])
    assert stub.count("PUT", document) == 3


@pytest.mark.parametrize("document", ["blobs/", *DOCUMENTS])
@pytest.mark.parametrize(
    "answer", [stub_s3.ACCESS_DENIED, stub_s3.EXPIRED_TOKEN, stub_s3.NO_SUCH_BUCKET], ids=["denied", "expired", "no bucket"]
)
async def test_a_publication_that_fails_says_why_and_the_next_try_completes_it(
    stub: StubS3, registry: Registry, answer: Answer, document: str
) -> None:
    stub.answer(answer, method="PUT", key=document)
    with pytest.raises((errors.StoreDenied, errors.StoreNoBucket)):
        await registry.publish(BASE, NAME, prepared())
    stub.heal()
    assert (await registry.publish(BASE, NAME, prepared())).ref.version == 1
    assert await versions(registry) == ([1], [1])
