"""What the real client makes of a store in trouble: AWS' own answers, from a stub on loopback that counts what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from adapters import errors
from adapters.store import Store, open_store
from tests import stub_s3
from tests.stub_s3 import PATIENT_S, Answer, StubS3, patience_s

Calls = dict[str, Callable[[], Awaitable[object]]]


@pytest.fixture
def stub() -> Iterator[StubS3]:
    with StubS3() as server:
        server.put("k", b"0123456789" * 100)
        yield server


def calls_of(store: Store) -> Calls:
    """Every call of a store, on the key `k`; the conditional ones write what is not written yet."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"streamed"

    async def listed() -> list[str]:
        return [row.key async for row in store.list("")]

    return {
        "get": lambda: store.get("k"),
        "get_range": lambda: store.get_range("k", 10, 100),
        "stat": lambda: store.stat("k"),
        "list": listed,
        "put": lambda: store.put("k", b"new"),
        "delete": lambda: store.delete("k"),
        "create": lambda: store.create("k", b"new"),
        "replace": lambda: store.replace("k", b"new", '"etag"'),
        "put_stream": lambda: store.put_stream("k", chunks()),  # type: ignore[attr-defined]
    }


def silence_s(answer: Answer) -> float:
    """Short where nothing but silence comes."""
    return 0.2 if patience_s(answer) < PATIENT_S else PATIENT_S


READS = {"get", "get_range", "stat", "list"}
BODIES = {"get", "get_range", "list"}
CONDITIONAL = {"create", "replace"}
REPEATABLE = {*READS, "put", "delete"}
ALL = {*REPEATABLE, *CONDITIONAL, "put_stream"}

NOT_S3 = Answer(404, b"<html>nginx</html>")

TROUBLES: list[tuple[str, Answer, set[str], type[errors.StoreError], str]] = [
    ("no such key", stub_s3.NO_SUCH_KEY, {"get", "get_range", "stat"}, errors.StoreMissing, "missing"),
    ("gone before a condition", stub_s3.NO_SUCH_KEY, CONDITIONAL, errors.StoreConflict, "conflict"),
    ("precondition failed", stub_s3.PRECONDITION_FAILED, CONDITIONAL, errors.StoreConflict, "conflict"),
    ("conditional conflict", stub_s3.CONDITIONAL_CONFLICT, CONDITIONAL, errors.StoreConflict, "conflict"),
    ("operation aborted", stub_s3.OPERATION_ABORTED, CONDITIONAL, errors.StoreConflict, "conflict"),
    ("no bucket", stub_s3.NO_SUCH_BUCKET, ALL, errors.StoreNoBucket, "no_bucket"),
    ("not implemented", stub_s3.NOT_IMPLEMENTED, ALL, errors.StoreMisconfigured, "not_supported"),
    ("somebody else's 404", NOT_S3, ALL, errors.StoreMisconfigured, "misconfigured"),
    ("access denied", stub_s3.ACCESS_DENIED, ALL, errors.StoreDenied, "denied"),
    ("bad signature", stub_s3.BAD_SIGNATURE, ALL, errors.StoreDenied, "denied"),
    ("unknown key id", stub_s3.BAD_KEY_ID, ALL, errors.StoreDenied, "denied"),
    ("wrong clock", stub_s3.REQUEST_EXPIRED, ALL, errors.StoreDenied, "denied"),
    ("one key denied", stub_s3.failed_delete("AccessDenied", "Access Denied"), {"delete"}, errors.StoreDenied, "denied"),
    ("expired token", stub_s3.EXPIRED_TOKEN, ALL, errors.StoreCredentialsExpired, "credentials_expired"),
    ("wrong region", stub_s3.WRONG_REGION, ALL, errors.StoreWrongRegion, "wrong_region"),
    ("moved", stub_s3.MOVED, ALL, errors.StoreWrongRegion, "wrong_region"),
    ("slow down", stub_s3.SLOW_DOWN, ALL, errors.StoreThrottled, "throttled"),
    ("too many", stub_s3.TOO_MANY_REQUESTS, ALL, errors.StoreThrottled, "throttled"),
    ("one key throttled", stub_s3.failed_delete("SlowDown", "Slow"), {"delete"}, errors.StoreThrottled, "throttled"),
    ("internal error", stub_s3.INTERNAL_ERROR, ALL, errors.StoreUnreachable, "unreachable"),
    ("unavailable", stub_s3.UNAVAILABLE, ALL, errors.StoreUnreachable, "unreachable"),
    ("request timeout", stub_s3.REQUEST_TIMEOUT, ALL, errors.StoreTimedOut, "timed_out"),
    ("hung up", stub_s3.HANG_UP, ALL, errors.StoreUnreachable, "unreachable"),
    ("silent", stub_s3.SILENT, ALL, errors.StoreTimedOut, "timed_out"),
    ("stalls in the body", stub_s3.STALL_IN_BODY, BODIES, errors.StoreTimedOut, "timed_out"),
    ("reset in the body", stub_s3.RESET_IN_BODY, BODIES, errors.StoreCutOff, "cut_off"),
    ("closed in the body", stub_s3.CUT_IN_BODY, BODIES, errors.StoreCutOff, "cut_off"),
]


@pytest.mark.parametrize(
    ("answer", "methods", "expected", "reason"), [row[1:] for row in TROUBLES], ids=[row[0] for row in TROUBLES]
)
class TestEachTrouble:
    async def test_is_its_own_error_in_every_call(
        self, stub: StubS3, answer: Answer, methods: set[str], expected: type[errors.StoreError], reason: str
    ) -> None:
        stub.answer(answer)
        calls = calls_of(open_store(stub.settings(request_timeout_s=silence_s(answer))))
        for name in sorted(methods):
            with pytest.raises(errors.StoreError) as caught:
                await calls[name]()
            assert (type(caught.value), caught.value.reason) == (expected, reason), name
            assert caught.value.code == "storage_unavailable"

    async def test_says_nothing_of_bucket_place_or_key(
        self, stub: StubS3, answer: Answer, methods: set[str], expected: type[errors.StoreError], reason: str
    ) -> None:
        stub.answer(answer)
        with pytest.raises(expected) as caught:
            await calls_of(open_store(stub.settings(request_timeout_s=silence_s(answer))))[min(methods)]()
        for secret in ("secret", "127.0.0.1", str(stub.port), "eu-central-1", "AKIA"):
            assert secret not in str(caught.value)


class TestWithoutAnAnswer:
    @pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
    async def test_no_connection_is_its_own_error(self, stub: StubS3, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        calls = calls_of(open_store(stub.settings(endpoint=endpoint)))
        for name in sorted(ALL):
            with pytest.raises(errors.StoreNoConnection) as caught:
                await calls[name]()
            assert caught.value.reason == "no_connection", name

    async def test_missing_credentials_are_their_own_error(self, stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # no service hands any out either
        store = open_store(stub.settings(access_key_id=None, secret_access_key=None))
        with pytest.raises(errors.StoreCredentialsMissing) as caught:
            await store.get("k")
        assert caught.value.reason == "credentials_missing"
        assert stub.count() == 0

    async def test_a_credentials_service_in_trouble_does_not_mean_that_there_are_none(
        self, stub: StubS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{stub.port}")
        stub.answer(Answer(503), key="latest/api/token")
        store = open_store(stub.settings(access_key_id=None, secret_access_key=None))
        with pytest.raises(errors.StoreUnreachable):
            await store.get("k")


class TestRetries:
    """How often a store is asked that would answer the third time."""

    @pytest.mark.parametrize("answer", [stub_s3.SLOW_DOWN, stub_s3.TOO_MANY_REQUESTS], ids=["503", "429"])
    @pytest.mark.parametrize("name", sorted({*REPEATABLE, "create"} - {"stat"}))
    async def test_a_throttled_call_is_tried_again(self, stub: StubS3, answer: Answer, name: str) -> None:
        if name == "create":
            stub.objects.clear()
        stub.answer(answer, times=2)
        await calls_of(open_store(stub.settings(retry_timeout_s=20)))[name]()
        assert stub.count() == 3

    @pytest.mark.parametrize(
        "answer", [stub_s3.INTERNAL_ERROR, stub_s3.HANG_UP, stub_s3.SILENT], ids=["500", "hang up", "silent"]
    )
    @pytest.mark.parametrize("name", sorted(REPEATABLE - {"stat"}))
    async def test_what_may_happen_twice_is_tried_again_after_a_lost_answer(
        self, stub: StubS3, answer: Answer, name: str
    ) -> None:
        stub.answer(answer, times=2)
        await calls_of(open_store(stub.settings(retry_timeout_s=20, request_timeout_s=patience_s(answer))))[name]()
        assert stub.count() == 3

    @pytest.mark.parametrize(
        "answer", [stub_s3.INTERNAL_ERROR, stub_s3.HANG_UP, stub_s3.SILENT], ids=["500", "hang up", "silent"]
    )
    @pytest.mark.parametrize("name", sorted(CONDITIONAL))
    async def test_a_conditional_write_is_not_repeated_after_a_lost_answer(self, stub: StubS3, answer: Answer, name: str) -> None:
        stub.answer(answer, times=2)
        with pytest.raises(errors.StoreUnreachable):
            await calls_of(open_store(stub.settings(retry_timeout_s=20, request_timeout_s=patience_s(answer))))[name]()
        assert stub.count() == 1

    @pytest.mark.parametrize("answer", [stub_s3.CUT_IN_BODY, stub_s3.RESET_IN_BODY], ids=["closed", "reset"])
    async def test_a_read_that_was_cut_off_is_read_again_whole(self, stub: StubS3, answer: Answer) -> None:
        store = open_store(stub.settings(retry_timeout_s=20))
        stub.answer(answer, times=1)
        assert await store.get_range("k", 5, 500) == (b"0123456789" * 100)[5:505]
        stub.answer(answer, times=1)
        assert (await store.get("k")).data == b"0123456789" * 100
        assert stub.count("GET") == 4

    @pytest.mark.parametrize(
        "row",
        [row for row in TROUBLES if row[4] in ("denied", "credentials_expired", "wrong_region", "no_bucket", "misconfigured")],
        ids=lambda row: row[0],
    )
    async def test_what_time_does_not_heal_is_not_tried_again(self, stub: StubS3, row: tuple) -> None:
        stub.answer(row[1])
        for name in sorted(row[2] - {"stat", "put_stream"}):
            stub.forget()
            with pytest.raises(row[3]):
                await calls_of(open_store(stub.settings(retry_timeout_s=20)))[name]()
            assert stub.count() == 1, name

    async def test_a_lost_condition_is_not_tried_again(self, stub: StubS3) -> None:
        for answer in (stub_s3.PRECONDITION_FAILED, stub_s3.CONDITIONAL_CONFLICT):
            for name in sorted(CONDITIONAL):
                stub.forget()
                stub.answer(answer, times=1)
                with pytest.raises(errors.StoreConflict):
                    await calls_of(open_store(stub.settings(retry_timeout_s=20)))[name]()
                assert stub.count() == 1

    async def test_an_unconditional_write_that_meets_another_is_tried_again(self, stub: StubS3) -> None:
        stub.answer(stub_s3.OPERATION_ABORTED, times=1)
        await open_store(stub.settings(retry_timeout_s=20)).put("k", b"new")
        assert stub.count("PUT") == 2

    async def test_a_streamed_upload_is_retried_by_the_client_and_by_nobody_else(self, stub: StubS3) -> None:
        stub.answer(stub_s3.SLOW_DOWN, method="PUT", times=2)
        await calls_of(open_store(stub.settings(retry_timeout_s=20)))["put_stream"]()
        assert stub.count("PUT") == 3
        assert stub.objects["k"].data == b"streamed"

    async def test_no_retries_means_one_request(self, stub: StubS3) -> None:
        stub.answer(stub_s3.SLOW_DOWN)
        for name in sorted(ALL - {"stat"}):
            stub.forget()
            with pytest.raises(errors.StoreThrottled):
                await calls_of(open_store(stub.settings(retry_timeout_s=0)))[name]()
            assert stub.count() == 1, name

    async def test_an_outage_is_not_multiplied(self, stub: StubS3) -> None:
        """Hundred calls cost a fifth more, and the reserve; without a budget they would cost a thousand."""
        store = open_store(stub.settings(retry_timeout_s=1))
        stub.answer(stub_s3.UNAVAILABLE)
        results = await asyncio.gather(*(store.get("k") for _ in range(100)), return_exceptions=True)
        assert {type(result) for result in results} == {errors.StoreUnreachable}
        assert stub.count() <= 100 + 20 + 20 + 15


class TestStat:
    async def test_of_a_healthy_store_is_one_call(self, stub: StubS3) -> None:
        assert (await open_store(stub.settings()).stat("k")).size_bytes == 1000
        assert [seen.method for seen in stub.seen] == ["HEAD"]

    async def test_asks_again_by_a_read_where_the_answer_could_not_say_why(self, stub: StubS3) -> None:
        with pytest.raises(errors.StoreMissing):
            await open_store(stub.settings()).stat("other")
        assert [seen.method for seen in stub.seen] == ["HEAD", "GET"]
