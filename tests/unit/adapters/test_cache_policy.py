"""What a full node cache gives up: worth by uses, age, bytes and the cost of a fetch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.cache.policy import HALF_LIFE_S, CacheEntry, choose_victims, used_again

MIB = 1024**2
NOW = 1_800_000_000.0


def entry(name: str, size_bytes: int = 100 * MIB, age_s: float = 0.0, uses: float = 1.0) -> CacheEntry:
    return CacheEntry(name, size_bytes, NOW - age_s, uses)


def test_what_is_used_often_stays_though_something_rare_came_later():
    assert choose_victims([entry("often", age_s=600, uses=20), entry("rare")], MIB) == ["rare"]


def test_what_was_used_often_long_ago_goes():
    assert choose_victims([entry("once-busy", age_s=10 * HALF_LIFE_S, uses=20), entry("rare")], MIB) == ["once-busy"]


def test_the_large_one_goes_first_among_equals_because_small_fetches_cost_more_for_each_byte():
    assert choose_victims([entry("small", MIB), entry("large", 700 * MIB)], MIB) == ["large"]


def test_small_ones_that_a_later_large_one_makes_needless_are_spared():
    entries = [entry("tiny-old", MIB, age_s=20 * HALF_LIFE_S), entry("large", 500 * MIB, age_s=HALF_LIFE_S), entry("new", uses=9)]
    assert choose_victims(entries, 400 * MIB) == ["large"]


def test_uses_decay_with_time_and_grow_by_one():
    assert used_again(3.0, NOW, NOW) == 4.0
    assert used_again(3.0, NOW - HALF_LIFE_S, NOW) == pytest.approx(2.5)
    assert used_again(3.0, NOW + 60, NOW) == 4.0, "a clock that went back makes nothing more valuable"


ENTRIES = st.lists(
    st.builds(CacheEntry, st.uuids().map(str), st.integers(0, 10**10), st.floats(0, 2e9), st.floats(0, 1e6)),
    max_size=12,
)


@given(ENTRIES, st.integers(-5, 10**11))
def test_victims_suffice_and_none_of_them_is_needless(entries: list[CacheEntry], need_bytes: int):
    victims = choose_victims(entries, need_bytes)
    sizes = {entry.digest: entry.size_bytes for entry in entries}
    freed = sum(sizes[digest] for digest in victims)
    if need_bytes <= 0 or sum(sizes.values()) < need_bytes:
        assert victims == []
        return
    assert freed >= need_bytes
    assert all(freed - sizes[digest] < need_bytes for digest in victims)
