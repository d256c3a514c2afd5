"""Plain values of specs: YAML, overrides, and the defaults that follow other values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from training.spec.errors import BadTrainSpec


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-6` is a number, as OmegaConf reads it; YAML 1.1 wants a dot in it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """A mapping. Raises BadTrainSpec, which says `name`."""
    values = _parsed(text, name)
    if not isinstance(values, dict):
        raise BadTrainSpec([f"{name} is no mapping of keys"])
    return values


def laid_over(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The values with `key.path=value` on top, later ones over earlier ones. Raises BadTrainSpec."""
    merged = deepcopy(dict(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or override.startswith("+"):
            raise BadTrainSpec([f"the override {override!r} is no key.path=value"])
        _put(merged, key, _parsed(text, key))
    return merged


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    section: Any = values
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise BadTrainSpec([f"{key} cannot be set: {parent} is {section!r}, no section"])
    section[last] = value


def _parsed(text: str, name: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BadTrainSpec([f"{name} is no YAML: {str(error)[:200]}"]) from None


def following(values: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults that SkyRL takes from other keys, where a spec says nothing of its own: `generator.max_input_length` from
    `trainer.max_prompt_length`, `trainer.algorithm.temperature` from that of sampling, `eval_sampling_params` greedy with the
    training's `max_generate_length`. Values of the wrong kind stay as they are; who validates them says so."""
    merged = deepcopy(dict(values))
    _follow(merged, "generator.max_input_length", _look(merged, "trainer.max_prompt_length"))
    _follow(merged, "trainer.algorithm.temperature", _look(merged, "generator.sampling_params.temperature"))
    if _look(merged, "generator.eval_sampling_params") is None:
        length = _look(merged, "generator.sampling_params.max_generate_length")
        greedy = {"temperature": 0.0} | ({} if length is None else {"max_generate_length": length})
        _follow(merged, "generator.eval_sampling_params", greedy)
    return merged


def _look(values: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(values, dict):
            return None
        values = values.get(name)
    return values


def _follow(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    section: Any = values
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            return
    if section.get(last) is None:
        section.pop(last, None)
        if value is not None:
            section[last] = value


def keyed(part: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys with their values, of parts and of frozen dataclasses among them."""
    found: dict[str, Any] = {}
    fields = dict(part) if isinstance(part, BaseModel) else asdict(part)
    for name, value in fields.items():
        key = f"{prefix}{name}"
        found |= keyed(value, f"{key}.") if isinstance(value, BaseModel) or is_dataclass(value) else {key: value}
    return found
