"""What a refusal says is an interface: texts change on purpose, and tell nothing that isn't the author's business."""

from __future__ import annotations

import json
import re

import pytest

from adapters.contract.refusals import HINTS
from tests.refusal_texts import SNAPSHOT, collected, text_of

# Folders of a machine, addresses of stores, the name of the user in the fixtures.
PRIVATE = re.compile(r"(?<![\w.])/(home|root|tmp|var|work|Users)\b|s3://|\bann\b|\\\\")
# An archive's refusals come before there is a folder; tests of their own provoke them.
OF_ARCHIVES = {"archive_corrupt", "archive_too_large", "archive_unsafe"}


@pytest.fixture(scope="module")
def now(tmp_path_factory):
    return json.loads(text_of(collected(tmp_path_factory.mktemp("refused"))))


def test_every_refusal_says_what_it_said(now):
    kept = json.loads(SNAPSHOT.read_text())

    assert now.keys() == kept.keys()
    for name, rows in now.items():
        assert rows == kept[name], f"{name}: if this is meant, run `python -m tests.refusal_texts`"


def test_every_code_is_provoked(now):
    assert {row["code"] for rows in now.values() for row in rows} == HINTS.keys() - OF_ARCHIVES


def test_no_text_tells_a_path_a_bucket_or_a_user(now):
    texts = [json.dumps(row, ensure_ascii=False) for rows in now.values() for row in rows]

    assert [text for text in texts if PRIVATE.search(text)] == []


def test_every_refusal_helps(now):
    rows = [(name, row) for name, rows in now.items() for row in rows]

    assert [name for name, row in rows if not row["message"] or not row["hint"]] == []
    assert [name for name, row in rows if row["limit"] is None] == []
