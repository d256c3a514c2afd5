"""The webhook against real servers on loopback: one that answers, ones that fail, one that never says a word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest
from pydantic import ValidationError

from adapters import webhook
from adapters.errors import Forbidden
from adapters.settings import WebhookSettings
from adapters.types import Head, HistoryRow
from adapters.webhook import Delivery, check_signature, notify, signature

SECRET = "a secret of the tests"
ROW = HistoryRow("production", 7, 8, "2026-11-29T12:00:00.000000Z", "ann", "better", "weights", {7: 90, 8: 10})
HEAD = Head("demo", "parrot", revision=12, history=(ROW,))


class Receiver:
    """Answers with one status after the other, the last one for ever; None closes the connection, "silent" says nothing."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        self.requests.append((head[0], headers, await reader.readexactly(int(headers["content-length"]))))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "silent":
            await asyncio.sleep(30)
        elif answer == "drip":
            with contextlib.suppress(ConnectionError):
                for byte in b"HTTP/1.1 200 OK" * 50:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.05)
        elif answer is not None:
            text = answer if isinstance(answer, str) else f"HTTP/1.1 {answer} Said\r\ncontent-length: 0\r\n\r\n"
            writer.write(text.encode())
        writer.close()


@contextlib.asynccontextmanager
async def receiving(*answers: object) -> AsyncIterator[Receiver]:
    receiver = Receiver(*answers)
    handlers: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(receiver.handle(reader, writer))
        handlers.add(task)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/moves?team=a"
    try:
        yield receiver
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(webhook, "FIRST_PAUSE_S", 0.001)


def settings(url: str, **fields) -> WebhookSettings:
    return WebhookSettings(url=url, secret=SECRET, **{"timeout_s": 2, "attempts": 3} | fields)


async def test_a_move_is_told_once_and_signed():
    async with receiving(204) as receiver:
        assert await notify(settings(receiver.url), HEAD, 11) == Delivery(True, 1, 204)
    ((line, headers, body),) = receiver.requests
    assert line == "POST /moves?team=a HTTP/1.1"
    assert headers["content-type"] == "application/json"
    check_signature(SECRET, headers["x-loramux-signature"], body, now_s=time.time())
    told = json.loads(body)
    assert (told["base"], told["adapter"], told["revision"]) == ("demo", "demo:parrot", 12)
    assert told["row"]["to_version"] == 8
    assert told["row"]["weights"] == {"7": 90, "8": 10}


@pytest.mark.parametrize("trouble", [500, 503, 429, 408, None, "nonsense\r\n"])
async def test_what_passes_by_itself_is_tried_again(trouble):
    async with receiving(trouble, 200) as receiver:
        delivery = await notify(settings(receiver.url), HEAD, 11)
    if trouble == "nonsense\r\n":
        assert delivery == Delivery(True, 2, 200)
    assert (delivery.delivered, delivery.attempts) == (True, 2)


@pytest.mark.parametrize("status", [301, 400, 401, 404, 410])
async def test_what_does_not_pass_is_not_tried_again(status):
    async with receiving(status) as receiver:
        assert await notify(settings(receiver.url), HEAD, 11) == Delivery(False, 1, status, "refused")
    assert len(receiver.requests) == 1


@pytest.mark.parametrize(("trouble", "reason"), [(500, "refused"), (None, "no_http"), ("SSH-2.0-x\r\n", "no_http")])
async def test_it_is_given_up_after_some_attempts(trouble, reason):
    async with receiving(trouble) as receiver:
        delivery = await notify(settings(receiver.url), HEAD, 11)
    assert (delivery.delivered, delivery.attempts, delivery.reason) == (False, 3, reason)
    assert len(receiver.requests) == 3


@pytest.mark.parametrize("manner", ["silent", "drip"])
async def test_a_receiver_that_takes_its_time_is_left_alone_when_the_time_is_over(manner):
    async with receiving(manner) as receiver:
        began = time.monotonic()
        delivery = await notify(settings(receiver.url, timeout_s=0.2, attempts=2), HEAD, 11)
    assert (delivery.delivered, delivery.reason) == (False, "timed_out")
    assert time.monotonic() - began < 3


async def test_nobody_there_is_no_error():
    delivery = await notify(settings("http://127.0.0.1:9/", attempts=1), HEAD, 11)
    assert (delivery.delivered, delivery.reason) == (False, "unreachable")


async def test_no_webhook_and_no_move_tell_nobody():
    assert await notify(WebhookSettings(), HEAD, 11) is None
    assert await notify(settings("http://127.0.0.1:9/"), HEAD, 12) is None
    assert await notify(settings("http://127.0.0.1:9/"), Head("demo", "parrot", revision=1), 0) is None


def test_a_signature_of_another_body_time_or_key_is_refused():
    signed = signature(SECRET, b"body", 1000)
    check_signature(SECRET, signed, b"body", now_s=1100)
    for secret, header, body, now_s in [
        (SECRET, signed, b"other", 1100),
        ("another", signed, b"body", 1100),
        (SECRET, signed, b"body", 2000),
        (SECRET, signed, b"body", 0),
        (SECRET, signed.replace("t=1000", "t=1001"), b"body", 1100),
        (SECRET, "", b"body", 1100),
        (SECRET, "t=x,v1=y", b"body", 1100),
        (SECRET, f"{signed[:-1]}é", b"body", 1100),
    ]:
        with pytest.raises(Forbidden):
            check_signature(secret, header, body, now_s=now_s)


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "http://a/"},
        {"url": "http://a/", "secret": ""},
        {"url": "ftp://a/", "secret": "x"},
        {"url": "a", "secret": "x"},
        {"url": "http://a/\r\nx: y", "secret": "x"},
        {"url": "http://a:99999/", "secret": "x"},
    ],
)
def test_settings_that_could_not_work_are_refused(fields):
    with pytest.raises(ValidationError):
        WebhookSettings(**fields)
