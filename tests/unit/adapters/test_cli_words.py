"""What people write to the commands: times, filters, shares. And how far two versions are apart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.cli import filters, listing, shares, times
from adapters.cli.trying import split_words
from adapters.difference import compare, difference_norm, update_norm
from adapters.errors import InvalidRequest
from adapters.types import AdapterEntry, FileDigest, Head, HistoryRow, VersionEntry
from tests.adapter_folders import safetensors_bytes

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


# Times


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-01", "2026-11-01T00:00:00.000000Z"),
        ("2026-11-01T12:30", "2026-11-01T12:30:00.000000Z"),
        ("2026-11-01 12:30:05+02:00", "2026-11-01T10:30:05.000000Z"),
        ("2026-11-01T12:30:05.25Z", "2026-11-01T12:30:05.250000Z"),
        ("2h ago", "2026-11-29T10:00:00.000000Z"),
        ("90s", "2026-11-29T11:58:30.000000Z"),
        ("1.5 d ago", "2026-11-28T00:00:00.000000Z"),
        ("now", "2026-11-29T12:00:00.000000Z"),
    ],
)
def test_a_moment_is_written_as_the_registry_writes_it(text: str, at: str):
    assert times.moment(text, NOW) == at


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "2 moons ago", "-2h"])
def test_what_is_no_time_is_refused(text: str):
    with pytest.raises(InvalidRequest):
        times.moment(text, NOW)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172800, "2 d"), (1209600, "2 w")],
)
def test_spans_have_one_number(seconds: float, shown: str):
    assert times.span(seconds) == shown


def test_an_age_is_never_below_nothing():
    assert times.age(times.stamp(NOW + timedelta(seconds=5)), NOW) == "0 s"


# Filters


def entry(name: str = "sql", *, size: int = 100, rank: int = 8, hours: float = 1, production: int | None = 1) -> AdapterEntry:
    at = times.stamp(NOW - timedelta(hours=hours))
    version = VersionEntry(1, "d" * 64, (FileDigest("adapter_model.safetensors", size, "a" * 64),), rank, at)
    return AdapterEntry("base", name, 1, {"production": production} if production else {}, {1: version})


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ("size>1GB", False),
        ("size<=100", True),
        ("size>=0.1kB", True),
        ("size=100B rank=8", True),
        ("rank!=8", False),
        ("age<2h", True),
        ("age>1d", False),
        ("production=1", True),
        ("newest<1", False),
        ("s*", True),
        ("base:s*", True),
        ("other sql", True),
        ("other", False),
    ],
)
def test_all_filters_and_one_of_the_globs_must_fit(words: str, passes: bool):
    assert filters.wanted([words]).lets_pass(entry(), NOW) is passes


def test_an_adapter_without_production_passes_no_comparison_of_it():
    assert not filters.wanted(["production>0"]).lets_pass(entry(production=None), NOW)
    assert not filters.wanted(["production!=1"]).lets_pass(entry(production=None), NOW)


@pytest.mark.parametrize("text", ["size>>1", "rank>=8GB", "colour=red", "size>", ">1", "age<soon", "size>1XB", "size!1"])
def test_what_is_no_filter_is_refused(text: str):
    with pytest.raises(InvalidRequest):
        filters.wanted([text])


def test_sizes_sort_the_largest_first_and_ages_the_youngest():
    entries = [entry("a", size=1, hours=3), entry("b", size=3, hours=1), entry("c", size=2, hours=2)]
    assert [row.name for row in filters.ordered(entries, "size", NOW)] == ["b", "c", "a"]
    assert [row.name for row in filters.ordered(entries, "age", NOW)] == ["b", "c", "a"]
    assert [row.name for row in filters.ordered(entries, "-size", NOW)] == ["a", "c", "b"]
    assert [row.name for row in filters.ordered(entries, "name", NOW)] == ["a", "b", "c"]


# Shares


@given(
    st.dictionaries(st.integers(1, 50), st.integers(1, 100), min_size=1, max_size=4),
    st.integers(51, 60),
    st.integers(1, 99),
)
def test_a_newcomer_gets_its_percentage_and_the_others_keep_their_proportions(weights, version, percent):
    shared = shares.with_share(weights, version, percent)
    total = sum(shared.values())
    assert shared[version] * 100 == pytest.approx(total * percent, rel=0.01)
    others = sum(weights.values())
    for number, weight in weights.items():
        assert shared[number] / (total - shared[version]) == pytest.approx(weight / others, rel=0.01)


def test_percentages_read_as_they_were_asked_for():
    assert shares.with_share({1: 1}, 2, 10) == {1: 90, 2: 10}
    assert shares.with_share({1: 90, 2: 10}, 2, 50) == {1: 50, 2: 50}
    assert shares.with_share({1: 90, 2: 10}, 2, 100) == {2: 100}
    assert shares.with_share({1: 90, 2: 10}, 2, 0) == {1: 100}


@pytest.mark.parametrize(("weights", "percent"), [({2: 1}, 10), ({}, 10), ({1: 1}, 101), ({1: 1}, -1)])
def test_a_share_that_makes_no_sense_is_refused(weights, percent):
    with pytest.raises(InvalidRequest):
        shares.with_share(weights, 2, percent)


# History


def test_where_the_history_was_cut_off_the_next_move_tells_what_was_live():
    head = Head("base", "sql", history=(HistoryRow("production", 4, 5, at="2026-11-02T00:00:00.000000Z"),))
    row = listing.lived_at(head, "production", "2026-11-01T00:00:00.000000Z")
    assert row is not None
    assert (row.to_version, row.kind) == (4, "unknown")
    assert listing.lived_at(head, "canary", "2026-11-01T00:00:00.000000Z") is None


# Chat


@pytest.mark.parametrize(
    ("words", "on_terminal", "split"),
    [
        (["sql", "hello"], True, (["sql"], "hello")),
        (["sql"], False, (["sql"], None)),
        (["sql@1", "sql@2"], False, (["sql@1", "sql@2"], None)),
        (["sql@1", "me@home"], True, (["sql@1"], "me@home")),
        (["sql", "who is it: you?"], False, (["sql"], "who is it: you?")),
        (["a", "b", "hello"], False, (["a", "b"], "hello")),
    ],
)
def test_the_words_of_chat_are_models_and_a_prompt(words, on_terminal, split):
    assert split_words(words, on_terminal) == split


# Difference


def factors(seed: int, rank: int, width_in: int = 20, width_out: int = 30) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(rank, width_in)), random.normal(size=(width_out, rank))


@pytest.mark.parametrize(("old_rank", "new_rank"), [(4, 4), (4, 16), (16, 2)])
def test_norms_are_those_of_the_whole_updates(old_rank: int, new_rank: int):
    old, new = factors(1, old_rank), factors(2, new_rank)
    assert update_norm(old) == pytest.approx(np.linalg.norm(old[1] @ old[0]), rel=1e-12)
    assert difference_norm(old, new) == pytest.approx(np.linalg.norm(old[1] @ old[0] - new[1] @ new[0]), rel=1e-12)


def test_equal_factors_don_t_differ_and_small_changes_are_seen():
    old = factors(1, 4)
    assert difference_norm(old, (old[0].copy(), old[1].copy())) == 0
    moved = (old[0], old[1] * (1 + 1e-5))
    assert difference_norm(old, moved) == pytest.approx(1e-5 * update_norm(old), rel=1e-3)


def canonical(folder: Path, tensors: dict[str, np.ndarray], rank: int) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}, "lora_alpha": {rank}}}')
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, dict.fromkeys(tensors, "F32")))
    return folder


def test_modules_come_the_most_changed_first_and_one_that_is_new_counts_whole(tmp_path: Path):
    def tensors(**modules: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        key = "base_model.model.{}.lora_{}.weight".format
        return {
            key(name, side): value.astype(np.float32)
            for name, pair in modules.items()
            for side, value in zip("AB", pair, strict=True)
        }

    kept, nudged = factors(1, 4), factors(2, 4)
    old = canonical(tmp_path / "old", tensors(kept=kept, nudged=nudged), 4)
    new = canonical(tmp_path / "new", tensors(kept=kept, nudged=(nudged[0], nudged[1] * 1.1), fresh=factors(3, 4)), 4)
    difference = compare(old, new)
    assert [(row.name, row.only_in) for row in difference.modules] == [("fresh", "to"), ("nudged", None), ("kept", None)]
    assert [row.relative for row in difference.modules] == pytest.approx([1.0, 0.1 / 1.1, 0.0], rel=1e-4)
    assert difference.config == {}
