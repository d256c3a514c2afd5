"""A small S3 in memory on loopback that answers as AWS does, and misbehaves on demand: in words, in time, in mid-body.

No local server answers like AWS when it is in trouble; this one speaks AWS' own documents. It runs in its own thread and event
loop, counts every request, and never closes by itself what a test did not ask it to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from adapters.settings import StoreSettings

BUCKET = "secret-bucket"
PREFIX = "secret-prefix"

How = Literal["whole", "silent", "hang_up", "reset_in_body", "cut_in_body", "stall_in_body", "corrupt_body"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gets instead of its due.

    `how`: `whole` is `status` and `body`; `silent` never answers; `hang_up` closes at once; of the due answer, `reset_in_body`,
    `cut_in_body` and `stall_in_body` send all headers and half of the body, then break the connection, close it or say no more;
    `corrupt_body` turns one bit.
    `after_s` passes first. `written` lets a write take place before its answer is spoilt.
    """

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    how: How = "whole"
    after_s: float = 0.0
    written: bool = False


def aws_error(status: int, code: str, message: str, more: str = "", **headers: str) -> Answer:
    """An error document as AWS writes it; `more` holds further elements."""
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message>{more}'
        "<RequestId>656c76696e6727732072657175657374</RequestId><HostId>Uuag1LuByRx9e6j5Onimru9pO4ZVKnJ2Qz7/C1NPcfTWAtRPfTaOFg==</HostId></Error>"
    )
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Answer(status, body.encode(), (("content-type", "application/xml"), *named))


def _xml(rows: str) -> Answer:
    return Answer(200, f'<?xml version="1.0" encoding="UTF-8"?>\n{rows}'.encode(), (("content-type", "application/xml"),))


def delete_result(rows: str) -> Answer:
    """The answer to a multi-object delete, which is 200 also when single keys failed."""
    return _xml(f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{rows}</DeleteResult>')


def failed_delete(code: str, message: str) -> Answer:
    """A delete whose one key failed."""
    return delete_result(f"<Error><Key>{PREFIX}/k</Key><Code>{code}</Code><Message>{message}</Message></Error>")


NO_SUCH_KEY = aws_error(404, "NoSuchKey", "The specified key does not exist.", f"<Key>{PREFIX}/k</Key>")
NO_SUCH_BUCKET = aws_error(404, "NoSuchBucket", "The specified bucket does not exist", f"<BucketName>{BUCKET}</BucketName>")
PRECONDITION_FAILED = aws_error(
    412,
    "PreconditionFailed",
    "At least one of the pre-conditions you specified did not hold",
    "<Condition>If-None-Match</Condition>",
)
CONDITIONAL_CONFLICT = aws_error(
    409,
    "ConditionalRequestConflict",
    "The conditional request cannot succeed due to a conflicting operation against this resource.",
    f"<Condition>If-Match</Condition><Key>{PREFIX}/k</Key>",
)
OPERATION_ABORTED = aws_error(
    409,
    "OperationAborted",
    "A conflicting conditional operation is currently in progress against this resource. Please try again.",
)
SLOW_DOWN = aws_error(503, "SlowDown", "Please reduce your request rate.")
TOO_MANY_REQUESTS = aws_error(429, "TooManyRequests", "Please reduce your request rate.")
INTERNAL_ERROR = aws_error(500, "InternalError", "We encountered an internal error. Please try again.")
REQUEST_TIMEOUT = aws_error(
    400,
    "RequestTimeout",
    "Your socket connection to the server was not read from or written to within the timeout period.",
)
UNAVAILABLE = aws_error(503, "ServiceUnavailable", "Service is unable to handle request.")
ACCESS_DENIED = aws_error(403, "AccessDenied", "Access Denied")
BAD_SIGNATURE = aws_error(
    403,
    "SignatureDoesNotMatch",
    "The request signature we calculated does not match the signature you provided. Check your key and signing method.",
    "<AWSAccessKeyId>AKIASECRET</AWSAccessKeyId>",
)
BAD_KEY_ID = aws_error(
    403,
    "InvalidAccessKeyId",
    "The AWS Access Key Id you provided does not exist in our records.",
    "<AWSAccessKeyId>a</AWSAccessKeyId>",
)
EXPIRED_TOKEN = aws_error(400, "ExpiredToken", "The provided token has expired.", "<Token-0>FwoGZXIvYXdzEB</Token-0>")
REQUEST_EXPIRED = aws_error(
    403,
    "RequestTimeTooSkewed",
    "The difference between the request time and the current time is too large.",
    "<RequestTime>20260101T000000Z</RequestTime><ServerTime>2026-01-02T00:00:00Z</ServerTime>",
)
WRONG_REGION = aws_error(
    400,
    "AuthorizationHeaderMalformed",
    "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-central-1'",
    "<Region>eu-central-1</Region>",
    x_amz_bucket_region="eu-central-1",
)
MOVED = aws_error(
    301,
    "PermanentRedirect",
    "The bucket you are attempting to access must be addressed using the specified endpoint. "
    "Please send all future requests to this endpoint.",
    f"<Endpoint>{BUCKET}.s3.eu-central-1.amazonaws.com</Endpoint><Bucket>{BUCKET}</Bucket>",
    x_amz_bucket_region="eu-central-1",
)
SOME_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
NOT_IMPLEMENTED = aws_error(
    501, "NotImplemented", "A header you provided implies functionality that is not implemented", "<Header>If-None-Match</Header>"
)
SILENT = Answer(how="silent")
HANG_UP = Answer(how="hang_up")
RESET_IN_BODY = Answer(how="reset_in_body")
CUT_IN_BODY = Answer(how="cut_in_body")
STALL_IN_BODY = Answer(how="stall_in_body")
CORRUPT_BODY = Answer(how="corrupt_body")


PATIENT_S = 30.0
IMPATIENT_S = 1.0


def patience_s(answer: Answer) -> float:
    """How long a client should wait for answers: a busy machine is no trouble of the store's, silence is."""
    return IMPATIENT_S if answer.how in ("silent", "stall_in_body") else PATIENT_S


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: its method (a listing is `LIST`, a multi-object delete of one key `DELETE`) and its key without the prefix."""

    method: str
    key: str


@dataclass(slots=True)
class _Plan:
    answer: Answer
    method: str | None
    key: str
    left: float


@dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    modified: datetime

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass(frozen=True, slots=True)
class _Request:
    seen: Seen
    headers: dict[str, str]
    query: dict[str, list[str]]
    body: bytes


@dataclass(slots=True)
class StubS3:
    """`with StubS3() as stub`: a store behind `stub.settings()`; `stub.answer(...)` plans trouble; `stub.count(...)` counts.

    With `ignores_conditions` every conditional write succeeds, as on some look-alikes.
    """

    ignores_conditions: bool = False
    objects: dict[str, _Stored] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    port: int = 0
    _plans: list[_Plan] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _server: asyncio.Server | None = None

    def __enter__(self) -> StubS3:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def settings(self, **others: object) -> StoreSettings:
        """Store settings for this server, without retries; `others` override single fields."""
        return StoreSettings.model_validate(
            {
                "url": f"s3://{BUCKET}/{PREFIX}",
                "endpoint": f"http://127.0.0.1:{self.port}",
                "access_key_id": "a",
                "secret_access_key": "b",
                "request_timeout_s": PATIENT_S,
                "retry_timeout_s": 0,
                **others,
            }
        )

    def answer(self, answer: Answer, *, method: str | None = None, key: str = "", times: float = math.inf) -> None:
        """The next `times` requests of `method` whose key contains `key` get this answer; a later plan comes first."""
        self._plans.insert(0, _Plan(answer, method, key, times))

    def heal(self) -> None:
        """Forgets all planned answers."""
        self._plans.clear()

    def forget(self) -> None:
        """Forgets what was counted."""
        self.seen.clear()

    def count(self, method: str | None = None, key: str = "") -> int:
        return sum(method in (None, seen.method) and key in seen.key for seen in list(self.seen))

    def put(self, key: str, data: bytes) -> None:
        """Puts an object there without a request."""
        self.objects[key] = _Stored(data, datetime.now(UTC))

    # The wire

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(await _read(reader), writer):
                pass
        writer.close()

    async def _one(self, request: _Request, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; says whether the connection goes on."""
        self.seen.append(request.seen)
        plan = self._plan(request.seen)
        if plan is None:
            return await _send(writer, self._due(request), request.seen.method)
        await asyncio.sleep(plan.after_s)
        due = self._due(request) if plan.written or plan.how not in ("whole", "hang_up", "silent") else plan
        if plan.how == "silent":
            await asyncio.sleep(3600)
        if plan.how == "hang_up":
            writer.transport.abort()
            return False
        return await _send(writer, plan if plan.how == "whole" else due, request.seen.method, plan.how)

    def _plan(self, seen: Seen) -> Answer | None:
        for plan in self._plans:
            if plan.left > 0 and plan.method in (None, seen.method) and plan.key in seen.key:
                plan.left -= 1
                return plan.answer
        return None

    # What a healthy store answers

    def _due(self, request: _Request) -> Answer:
        works = {
            "GET": self._get,
            "HEAD": self._get,
            "PUT": self._put,
            "DELETE": self._delete,
            "LIST": self._list,
            "POST": self._post,
        }
        return works[request.seen.method](request)

    def _get(self, request: _Request) -> Answer:
        stored = self.objects.get(request.seen.key)
        if stored is None:
            return NO_SUCH_KEY
        headers = (("etag", stored.etag), ("last-modified", format_datetime(stored.modified, usegmt=True)))
        wanted = request.headers.get("range")
        if wanted is None:
            return Answer(200, stored.data, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(stored.data)), len(stored.data) - 1)
        if start >= len(stored.data):
            return aws_error(416, "InvalidRange", "The requested range is not satisfiable")
        part = ("content-range", f"bytes {start}-{end}/{len(stored.data)}")
        return Answer(206, stored.data[start : end + 1], (*headers, part))

    def _post(self, request: _Request) -> Answer:
        """A multipart upload begins or ends."""
        key = request.seen.key
        if "uploads" in request.query:
            return _xml(f"<InitiateMultipartUploadResult><UploadId>{key}</UploadId></InitiateMultipartUploadResult>")
        parts = [number for of, number in self.parts if of == key]
        self.put(key, b"".join(self.parts.pop((key, number)) for number in sorted(parts)))
        etag = escape(self.objects[key].etag)
        return _xml(f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>")

    def _put(self, request: _Request) -> Answer:
        if "partNumber" in request.query:
            self.parts[request.seen.key, int(request.query["partNumber"][0])] = request.body
            return Answer(200, b"", (("etag", '"part"'),))
        stored, key = self.objects.get(request.seen.key), request.seen.key
        if not self.ignores_conditions:
            if "if-none-match" in request.headers and stored is not None:
                return PRECONDITION_FAILED
            if "if-match" in request.headers and stored is None:
                return NO_SUCH_KEY
            if "if-match" in request.headers and stored.etag != request.headers["if-match"]:
                return PRECONDITION_FAILED
        self.put(key, request.body)
        return Answer(200, b"", (("etag", self.objects[key].etag),))

    def _delete(self, request: _Request) -> Answer:
        self.objects.pop(request.seen.key, None)
        return delete_result(f"<Deleted><Key>{escape(f'{PREFIX}/{request.seen.key}')}</Key></Deleted>")

    def _list(self, request: _Request) -> Answer:
        rows = "".join(
            f"<Contents><Key>{escape(f'{PREFIX}/{key}')}</Key><LastModified>{stored.modified.strftime('%Y-%m-%dT%H:%M:%S.000Z')}"
            f"</LastModified><ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key, stored in sorted(self.objects.items())
            if key.startswith(request.seen.key)
        )
        return _xml(
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{BUCKET}</Name>'
            f"<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        )


async def _read(reader: asyncio.StreamReader) -> _Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, target, _ = first.split(" ", 2)
    address = urlsplit(target)
    query = parse_qs(address.query, keep_blank_values=True)
    key = unquote(address.path).removeprefix(f"/{BUCKET}").lstrip("/")
    if method == "GET" and "list-type" in query:
        method, key = "LIST", query.get("prefix", [""])[0]
    if method == "POST" and "delete" in query:
        method, key = "DELETE", unescape(body.decode().partition("<Key>")[2].partition("</Key>")[0])
    key = key.removeprefix(PREFIX).removeprefix("/")
    return _Request(Seen(method, key), headers, query, body)


async def _send(writer: asyncio.StreamWriter, answer: Answer, method: str, how: How = "whole") -> bool:
    body = answer.body
    if how == "corrupt_body" and body:
        body = bytes([body[0] ^ 1]) + body[1:]
    headers = (*answer.headers, ("content-length", str(len(body))))
    lines = [f"HTTP/1.1 {answer.status} X", *(f"{name}: {value}" for name, value in headers), "", ""]
    writer.write("\r\n".join(lines).encode("latin-1"))
    sent = body if how in ("whole", "corrupt_body") else body[: len(body) // 2]
    writer.write(b"" if method == "HEAD" else sent)
    await writer.drain()
    if how == "stall_in_body":
        await asyncio.sleep(3600)
    if how in ("cut_in_body", "reset_in_body"):
        await asyncio.sleep(0.02)  # the client has its half
        writer.close() if how == "cut_in_body" else _reset(writer)
        return False
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a reset instead of a polite end."""
    import socket
    import struct

    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
