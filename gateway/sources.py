"""Which addresses adapters may be published from."""

from __future__ import annotations

from urllib.parse import urlsplit

from adapters.errors import Forbidden, InvalidRequest

SCHEMES = ("s3", "file", "memory")


def check_source(source: str, allowed: tuple[str, ...]) -> str:
    """The address in its one form, if it lies below an allowed one. Raises InvalidRequest for what is no address, Forbidden,
    with the reason `source_not_allowed`, for all others; that message does not say what is allowed."""
    wanted = _segments(source)
    if not any(wanted[: len(prefix)] == prefix for prefix in map(_segments, allowed)):
        raise Forbidden("adapters may not be published from there", reason="source_not_allowed", param="source")
    scheme, place, *path = wanted
    return f"{scheme}://{place}/{'/'.join(path)}" if path else f"{scheme}://{place}"


def _segments(address: str) -> tuple[str, ...]:
    """Scheme, bucket and path segments. What could mean two things to two readers is refused, not guessed at."""
    if not address.isascii() or not address.isprintable() or set(address) & set("%?#\\@*"):
        raise _bad("it holds characters that an address here never has")
    try:
        parts = urlsplit(address)
    except ValueError:
        raise _bad("it does not parse") from None
    if parts.scheme not in SCHEMES or (parts.scheme != "file" and not parts.netloc):
        raise _bad("it begins with none of `s3://bucket/`, `file:///`")
    if parts.scheme == "file" and parts.netloc:
        raise _bad("a file has no host")
    path = parts.path.removeprefix("/").removesuffix("/")
    segments = path.split("/") if path else []
    if any(segment in ("", ".", "..") for segment in segments):
        raise _bad("it has empty, `.` or `..` segments")
    return (parts.scheme, parts.netloc.lower() if parts.scheme == "s3" else parts.netloc, *segments)


def _bad(why: str) -> InvalidRequest:
    return InvalidRequest(f"the source is no address of a folder: {why}", param="source", reason="bad_source")
