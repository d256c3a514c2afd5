"""The `drop` section: what it leaves out is the registry's, and it must go into a base that is served."""

from __future__ import annotations

import pytest

from adapters.errors import InvalidRequest
from serve_app.settings import parse_settings

REST = {
    "registry": {"url": "s3://b/registry", "endpoint": "http://store", "access_key_id": "k", "secret_access_key": "s"},
    "bases": [{"id": "demo"}],
}


def test_what_is_left_out_is_the_registrys():
    settings = parse_settings({**REST, "drop": {"url": "s3://b/drop", "base": "demo", "promote": "canary"}})
    assert settings.drop is not None
    reached = settings.drop.store_settings(settings.registry)
    assert (reached.url, reached.endpoint, reached.access_key_id) == ("s3://b/drop", "http://store", "k")


def test_a_neighbour_of_the_registry_is_fine():
    assert parse_settings({**REST, "drop": {"url": "s3://b/registry-drop", "base": "demo"}}).drop


def test_none_is_watched_by_default():
    assert parse_settings(REST).drop is None


@pytest.mark.parametrize(
    ("drop", "told"),
    [
        ({"url": "s3://b/drop", "base": "dmo"}, "none of the bases"),
        ({"url": "s3://b/drop"}, "drop.base"),
        ({"url": "s3://b/drop", "base": "demo", "setle_s": 3}, "settle_s"),
        ({"url": "s3://b/registry/", "base": "demo"}, "lie in each other"),
        ({"url": "s3://b", "base": "demo"}, "lie in each other"),
        ({"url": "s3://b/registry/drop", "base": "demo"}, "lie in each other"),
    ],
)
def test_mistakes_are_named(drop: dict, told: str):
    with pytest.raises(InvalidRequest, match=told):
        parse_settings({**REST, "drop": drop})
