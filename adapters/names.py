"""The grammar of names: what a model field, a ref, an alias and a base key look like. One parser for everybody."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from adapters.errors import InvalidModelName, InvalidRequest

PRODUCTION = "production"
LATEST = "latest"
RESERVED_ADAPTER_NAMES = frozenset({"versions"})

MAX_MODEL_NAME_CHARS = 512

_SEGMENT = r"[a-z0-9][a-z0-9._-]{0,62}"
_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9/._-]{0,199}")
_ADAPTER = re.compile(rf"(?:{_SEGMENT}/)?{_SEGMENT}")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,31}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_VERSION_LIKE_ALIAS = re.compile(r"v[0-9]+")
_TAKES = "a model is `base`, `base:name`, `base:name@7` or `base:name@alias`"


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    """A version of an adapter of a base: the one identity that travels inside. Its text is `base:name@7`."""

    base: str
    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.base}:{self.name}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> AdapterRef:
        """Raises InvalidModelName unless `text` names a base, an adapter and a version number."""
        model = parse_model_name(text)
        if model.adapter is None or model.version is None:
            raise InvalidModelName(f"`{text[:100]}` is not a ref; a ref is `base:name@7`", param="model")
        return cls(model.base, model.adapter, model.version)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A parsed model field. Without an adapter it is the bare base; `version` and `alias` exclude each other."""

    base: str
    adapter: str | None = None
    version: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        if self.adapter is None:
            return self.base
        selector = self.version if self.version is not None else self.alias
        return f"{self.base}:{self.adapter}" + (f"@{selector}" if selector != PRODUCTION else "")


def parse_model_name(text: str) -> ModelName:
    """Parses a model field. `base:name` means the alias `production`. Raises InvalidModelName; touches nothing else."""
    if len(text) > MAX_MODEL_NAME_CHARS:
        raise InvalidModelName(
            f"the model name has {len(text)} characters; at most {MAX_MODEL_NAME_CHARS} are taken",
            limit=MAX_MODEL_NAME_CHARS,
            value=len(text),
            param="model",
        )
    base, colon, rest = text.partition(":")
    if not _BASE.fullmatch(base):
        raise InvalidModelName(f"`{_shown(text)}` does not name a base; {_TAKES}", param="model")
    if not colon:
        return ModelName(base)
    adapter, at, selector = rest.partition("@")
    if not _ADAPTER.fullmatch(adapter) or adapter in RESERVED_ADAPTER_NAMES:
        raise InvalidModelName(
            f"`{_shown(adapter)}` is no adapter name; {_TAKES}, and a name is lower case: "
            "letters, digits, `.`, `_`, `-`, optionally `team/` before it",
            param="model",
            hint=_adapter_hint(adapter),
        )
    if not at:
        return ModelName(base, adapter, alias=PRODUCTION)
    if _VERSION.fullmatch(selector):
        return ModelName(base, adapter, version=int(selector))
    if _VERSION_LIKE_ALIAS.fullmatch(selector):
        raise InvalidModelName(f"`@{selector}` is no alias; {_TAKES}", param="model", hint=f"try `@{selector[1:]}`")
    if not _ALIAS.fullmatch(selector):
        raise InvalidModelName(f"`@{_shown(selector)}` is neither a version nor an alias; {_TAKES}", param="model")
    return ModelName(base, adapter, alias=selector)


def check_base_id(base: str) -> str:
    """Returns `base` or raises InvalidRequest."""
    if not _BASE.fullmatch(base):
        raise InvalidRequest(
            f"`{_shown(base)}` is no base id: letters, digits, `/`, `.`, `_`, `-`, at most 200, never `:` or `@`", param="base"
        )
    return base


def check_adapter_name(name: str) -> str:
    """Returns `name` or raises InvalidRequest, with the nearest allowed spelling as a hint."""
    if name in RESERVED_ADAPTER_NAMES:
        raise InvalidRequest(f"`{name}` is a reserved name", param="name")
    if not _ADAPTER.fullmatch(name):
        raise InvalidRequest(
            f"`{_shown(name)}` is no adapter name: lower-case letters, digits, `.`, `_`, `-`, at most 63, "
            "optionally one namespace and `/` before it",
            param="name",
            hint=_adapter_hint(name),
        )
    return name


def check_alias(alias: str) -> str:
    """Returns `alias` if it may be created and moved; `latest` is computed and `v7` is refused. Raises InvalidRequest."""
    if alias == LATEST:
        raise InvalidRequest("`latest` is computed from the newest version and can't be moved", param="alias")
    if _VERSION_LIKE_ALIAS.fullmatch(alias):
        raise InvalidRequest(f"`{alias}` looks like a version and can't be an alias", param="alias")
    if not _ALIAS.fullmatch(alias):
        raise InvalidRequest(
            f"`{_shown(alias)}` is no alias: a lower-case letter, then letters, digits or `-`, at most 32", param="alias"
        )
    return alias


def base_key(base: str) -> str:
    """The base id as one path segment: percent-encoded, nothing safe but `A-Za-z0-9._-`."""
    return quote(base, safe="")


def base_of_key(key: str) -> str:
    """The inverse of `base_key`."""
    return unquote(key)


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def slug_of(name: str) -> str | None:
    """The nearest allowed spelling of an adapter's name; None if there is none, or if `name` is allowed as it is."""
    slug = re.sub(r"[^a-z0-9._/-]+", "-", name.lower()).strip("-./_")
    return slug if slug and slug != name and _ADAPTER.fullmatch(slug) else None


def _adapter_hint(name: str) -> str | None:
    slug = slug_of(name)
    return f"try `{slug}`" if slug else None
