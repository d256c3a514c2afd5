"""multipart/form-data as it arrives: chunks go in, the parts' beginnings, data and ends come out; nothing is kept."""

from __future__ import annotations

from dataclasses import dataclass

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from adapters.errors import InvalidRequest

MAX_PART_HEADERS = 8
MAX_HEADER_BYTES = 4096
BAD = "bad_multipart"


@dataclass(frozen=True, slots=True)
class Begin:
    """A part begins; `filename` is None for a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class Data:
    """Some bytes of the part."""

    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The part is complete."""


Event = Begin | Data | End


class Multipart:
    """One body. Raises InvalidRequest, with the reason `bad_multipart`, for what is none."""

    def __init__(self, content_type: str) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if not boundary or len(boundary) > 200:
            raise _bad("the content type names no boundary")
        self._events: list[Event] = []
        self._field = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_part_data": lambda data, start, end: self._events.append(Data(data[start:end])),
                "on_part_end": lambda: self._events.append(End()),
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_end": self._end,
            },
            max_header_count=MAX_PART_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def feed(self, chunk: bytes) -> list[Event]:
        """What the chunk completes."""
        try:
            self._parser.write(chunk)
        except MultipartParseError:
            raise _bad("the body is no multipart/form-data with the boundary of its content type") from None
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Raises InvalidRequest if the closing boundary is missing."""
        if not self._ended:
            raise _bad("the body ends before its closing boundary")

    def _part_begin(self) -> None:
        self._headers = {}
        self._field = self._value = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _headers_finished(self) -> None:
        disposition, options = parse_options_header(self._headers.get(b"content-disposition"))
        if disposition != b"form-data" or b"name" not in options:
            raise _bad("a part has no `content-disposition: form-data` with a name")
        filename = options.get(b"filename")
        self._events.append(Begin(_text(options[b"name"]), None if filename is None else _text(filename)))

    def _end(self) -> None:
        self._ended = True


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason=BAD, hint="curl: -F file=@adapter_config.json -F file=@adapter_model.safetensors")
