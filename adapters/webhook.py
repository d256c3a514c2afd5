"""Tells somebody else's server of every move of an alias, signed. It never fails or holds up the move itself.

    POST <url>
    x-loramux-signature: t=<Unix seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>">
    {"base": ..., "adapter": "base:name", "revision": 7, "row": {"alias": ..., "from_version": ..., ...}}

At least once: `adapter` and `revision` together name a move, so a receiver can leave out what it has seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
import ssl
import time
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from adapters.errors import Forbidden
from adapters.settings import WebhookSettings
from adapters.types import Head

SIGNATURE_HEADER = "x-loramux-signature"
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
MAX_STATUS_LINE_BYTES = 1024
_WORTH_ANOTHER_TRY = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came of telling. `status` is the receiver's last answer, `reason` says why it was not told: `unreachable`,
    `timed_out`, `no_http`, `refused` (any status but 2xx)."""

    delivered: bool
    attempts: int
    status: int | None = None
    reason: str | None = None


async def notify(settings: WebhookSettings, head: Head, before_revision: int) -> Delivery | None:
    """Tells of the newest row of the head's history; None if there is nothing to tell: no webhook, or no move since then.

    Takes at most `attempts` times `timeout_s` and the pauses between. Raises nothing.
    """
    if settings.url is None or head.revision <= before_revision or not head.history:
        return None
    body = payload(head)
    outcome = Delivery(False, 0, None, "unreachable")
    for attempt in range(1, settings.attempts + 1):
        if attempt > 1:
            await asyncio.sleep(_pause_s(attempt - 1))
        outcome = await _attempt(settings, body, attempt)
        if outcome.delivered or not _passes_by_itself(outcome):
            break
    return outcome


def payload(head: Head) -> bytes:
    """The body that tells of the newest row."""
    document = {
        "base": head.base,
        "adapter": f"{head.base}:{head.name}",
        "revision": head.revision,
        "row": asdict(head.history[-1]),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def signature(secret: str, body: bytes, now_s: int) -> str:
    """The value of the header."""
    return f"t={now_s},v1={_mac(secret, body, str(now_s))}"


def check_signature(secret: str, header: str, body: bytes, *, now_s: float, tolerance_s: float = 300) -> None:
    """For receivers: raises Forbidden unless `body` was signed with `secret` at most `tolerance_s` ago."""
    fields = dict(part.partition("=")[::2] for part in header.split(","))
    stamp = fields.get("t", "")
    if not stamp.isascii() or not stamp.isdigit() or abs(now_s - int(stamp[:15])) > tolerance_s:
        raise Forbidden("the signature is too old, or from the future", reason="signature_expired", limit=tolerance_s)
    if not hmac.compare_digest(_mac(secret, body, stamp).encode(), fields.get("v1", "").encode()):
        raise Forbidden("the signature is not that of this body", reason="signature_differs")


def _mac(secret: str, body: bytes, stamp: str) -> str:
    return hmac.new(secret.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()


def _pause_s(failures: int) -> float:
    return random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)


def _passes_by_itself(outcome: Delivery) -> bool:
    return outcome.status is None or outcome.status >= 500 or outcome.status in _WORTH_ANOTHER_TRY


async def _attempt(settings: WebhookSettings, body: bytes, attempt: int) -> Delivery:
    try:
        async with asyncio.timeout(settings.timeout_s):
            status = await _post(settings, body)
    except TimeoutError:
        return Delivery(False, attempt, None, "timed_out")
    except (OSError, asyncio.IncompleteReadError, ssl.SSLError):
        return Delivery(False, attempt, None, "unreachable")
    except ValueError:
        return Delivery(False, attempt, None, "no_http")
    delivered = 200 <= status < 300
    return Delivery(delivered, attempt, status, None if delivered else "refused")


async def _post(settings: WebhookSettings, body: bytes) -> int:
    """The status of the answer; its body is nobody's business. Sockets of the loop, so that a time limit really ends it."""
    url = urlsplit(str(settings.url))
    secure = url.scheme == "https"
    reader, writer = await asyncio.open_connection(
        url.hostname, url.port or (443 if secure else 80), ssl=secure or None, limit=MAX_STATUS_LINE_BYTES
    )
    try:
        writer.write(_request(settings, body))
        await writer.drain()
        return _status(await reader.readline())
    finally:
        writer.close()


def _request(settings: WebhookSettings, body: bytes) -> bytes:
    url = urlsplit(str(settings.url))
    secret = settings.secret.get_secret_value() if settings.secret else ""
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    host = url.netloc.rpartition("@")[2]
    lines = [
        f"POST {target} HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"{SIGNATURE_HEADER}: {signature(secret, body, int(time.time()))}",
        "user-agent: loramux",
        "connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def _status(line: bytes) -> int:
    """Raises ValueError for what is no HTTP."""
    words = line.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("no status line")
    return int(words[1])
