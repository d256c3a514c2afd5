"""A running gateway as the commands see it: where it is, what it answers, and its errors as ours."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from adapters.errors import DeadlineExceeded, EngineUnavailable, InternalError, InvalidRequest, LoraMuxError
from adapters.settings import read_config

URL_VARIABLE = "LORAMUX_GATEWAY_URL"
KEY_VARIABLE = "LORAMUX_API_KEY"
DEFAULT_PORT = 8000
ANSWER_TIMEOUT_S = 120.0
GLANCE_TIMEOUT_S = 1.0  # for what is nice to know, in a command that is about something else
TIERS = ("engine", "disk", "remote")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Gateway:
    """One gateway by its address. Methods raise EngineUnavailable while it doesn't answer, else what it says."""

    def __init__(self, url: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._timeout_s = timeout_s
        # a proxy of the environment can't reach this machine's own loopback
        proxies = urllib.request.ProxyHandler({} if urlsplit(self.url).hostname in LOOPBACK else None)
        self._opener = urllib.request.build_opener(proxies)

    def get(self, path: str, **query: Any) -> Any:
        return self._json(self._request(path, query, None))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._json(self._request(path, {}, body))

    def text(self, path: str) -> str:
        with self._open(self._request(path, {}, None)) as response:
            return response.read().decode(errors="replace")

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[dict[str, str], Iterator[dict[str, Any]]]]:
        """The headers and the events of a streamed answer, each as it arrives; an error in mid-stream is raised.

        After a long wait some headers come late, as comments of the stream; they join the others then.
        """
        with self._open(self._request(path, {}, body)) as response:
            headers = {key.lower(): value for key, value in response.headers.items()}
            yield headers, self._events(response, headers)

    def readiness(self) -> dict[str, Any]:
        """`/readyz`: `status` is `ok`, or `starting` with what is missing."""
        try:
            return self.get("/readyz")
        except _NoError as error:
            return error.body

    def residency(self) -> dict[str, dict[str, Any]]:
        """What is loaded, by base."""
        return self.get("/registry/v1/residency")

    def look(self) -> None:
        """Makes the gateway look at the registry now, so that what was published a moment ago is known; if it can't, it can't."""
        with contextlib.suppress(LoraMuxError):
            self.post("/registry/v1/refresh", {})

    def models(self) -> list[str]:
        """The ids of bases and adapters that clients see."""
        return [card["id"] for card in self.get("/v1/models")["data"]]

    def model(self, ref: str) -> str:
        """`name@7` as a model field: with the base before it, which may be left out where one is served or one has the name.

        Raises InvalidRequest.
        """
        if ":" in ref:
            return ref
        ids = self.models()
        bases = [model for model in ids if ":" not in model]
        if ref in bases:
            return ref
        having = [model.partition(":")[0] for model in ids if model.partition(":")[2] == ref.partition("@")[0]]
        for choice in (having, bases):
            if len(choice) == 1:
                return f"{choice[0]}:{ref}"
        known = ", ".join(having or bases) or "none is served here"
        raise InvalidRequest(f"which base? {known}", param="model", hint=f"write `base:{ref}`")

    def _request(self, path: str, query: dict[str, Any], body: dict[str, Any] | None) -> urllib.request.Request:
        headers = {"content-type": "application/json"}
        if os.environ.get(KEY_VARIABLE):
            headers["authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
        url = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            return urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)
        except ValueError:
            raise InvalidRequest("the gateway's address is no URL", value=self.url, hint="write `http://host:8000`") from None

    def _json(self, request: urllib.request.Request) -> Any:
        with self._open(request) as response:
            try:
                return json.loads(response.read())
            except ValueError:
                raise self._strange() from None

    @contextlib.contextmanager
    def _open(self, request: urllib.request.Request) -> Iterator[Any]:
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise _said(error, self._strange()) from None
        except TimeoutError:
            raise DeadlineExceeded("the gateway gave no answer in time", limit=f"{self._timeout_s:g} s") from None
        except (OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise DeadlineExceeded("the gateway gave no answer in time", limit=f"{self._timeout_s:g} s") from None
            raise EngineUnavailable(
                "no gateway answers",
                reason="gateway_unreachable",
                value=self.url,
                hint=f"`loramux up`, or --gateway or {URL_VARIABLE}",
            ) from None

    def _events(self, response: Any, headers: dict[str, str]) -> Iterator[dict[str, Any]]:
        for line in response:
            text = line.decode(errors="replace").strip()
            if text.startswith(": ") and ": " in text[2:]:
                name, _, value = text[2:].partition(": ")
                headers[name.lower()] = value
            if not text.startswith("data:") or text == "data: [DONE]":
                continue
            event = json.loads(text.removeprefix("data:"))
            if "error" in event:
                raise error_of(event["error"])
            yield event

    def _strange(self) -> LoraMuxError:
        return InternalError("what answers there is no LoraMux gateway", value=self.url, hint="check --gateway")


def find_gateway(url: str | None, config: Path | None, timeout_s: float = ANSWER_TIMEOUT_S) -> Gateway:
    """The gateway that was named, or the environment's, or the settings file's."""
    return Gateway(named_gateway(url) or _configured(config) or f"http://127.0.0.1:{DEFAULT_PORT}", timeout_s)


def known_gateway(url: str | None, config: Path | None, timeout_s: float) -> Gateway | None:
    """The gateway that was named or is configured; None where there is only the default address."""
    return find_gateway(url, config, timeout_s) if named_gateway(url) or _configured(config) else None


def answering(url: str | None, config: Path | None, as_json: bool = False) -> dict[str, str] | None:
    """Ref to tier of what a gateway has loaded; None where none was named and none answers at once."""
    from adapters.cli.output import fail

    asked = named_gateway(url)
    if asked is None and _configured(config) is None:
        return None
    try:
        return tiers(find_gateway(url, config, GLANCE_TIMEOUT_S * (5 if asked else 1)).residency())
    except LoraMuxError as error:
        if asked is not None:
            fail(error, as_json)
        return None


def tiers(residency: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Ref to the best tier that any replica has it in."""
    found: dict[str, str] = {}
    for view in residency.values():
        found |= dict.fromkeys(view.get("resident", {}), TIERS[0])
        for report in view.get("replicas", ()):
            for ref, row in report.get("adapters", {}).items():
                found[ref] = lower_of((found.get(ref, row["tier"]), row["tier"]))
    return found


def lower_of(names: Iterable[str]) -> str:
    """Of tiers the one from which an answer comes soonest."""
    return min(names, key=TIERS.index)


def error_of(body: dict[str, Any]) -> LoraMuxError:
    """The error that a gateway put into OpenAI's shape, as our class."""
    kinds = {kind.code: kind for kind in _kinds(LoraMuxError)}
    details = {name: body.get(name) for name in ("reason", "limit", "value", "param", "hint") if body.get(name) is not None}
    return kinds.get(str(body.get("code")), InternalError)(str(body.get("message", "the gateway says no more")), **details)


def _kinds(kind: type[LoraMuxError]) -> Iterator[type[LoraMuxError]]:
    """Subclasses first, so that of several with one code the most general comes last and stays."""
    for child in kind.__subclasses__():
        yield from _kinds(child)
    yield kind


class _NoError(InternalError):
    """A status that is an error's with a body that is none."""

    body: dict[str, Any]


def _said(error: urllib.error.HTTPError, strange: LoraMuxError) -> LoraMuxError:
    try:
        body = json.loads(error.read())
        if "error" in body:
            return error_of(body["error"])
    except (ValueError, TypeError, OSError):
        return strange
    other = _NoError(strange.message, **strange.details())
    other.body = body
    return other


def named_gateway(url: str | None) -> str | None:
    """The gateway that somebody asked for, on the command line or in the environment."""
    return url or os.environ.get(URL_VARIABLE) or None


def _configured(config: Path | None) -> str | None:
    """Only the two keys that matter are read, so a file with troubles elsewhere still tells."""
    try:
        section = read_config(config).get("gateway")
    except LoraMuxError:
        return None
    if not isinstance(section, dict):
        return None
    host = str(section.get("host", "127.0.0.1"))
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{section.get('port', DEFAULT_PORT)}"
