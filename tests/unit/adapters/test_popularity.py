"""Popularity: uses that decay, on a clock of uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.popularity import Popularity


def test_a_use_is_worth_one_when_it_happens_and_half_as_much_a_half_life_later():
    popularity = Popularity[str](half_life=4)
    popularity.use("a")
    assert popularity.value("a") == pytest.approx(1.0)
    for _ in range(4):
        popularity.use("b")
    assert popularity.value("a") == pytest.approx(0.5)


def test_what_was_never_used_is_worth_nothing():
    assert Popularity[str](half_life=4).value("a") == 0.0


def test_a_scan_of_newcomers_does_not_outweigh_what_is_used_often():
    popularity = Popularity[str](half_life=32)
    for _ in range(10):
        popularity.use("busy")
    for index in range(20):
        popularity.use(f"rare-{index}")
    assert popularity.busiest(1) == ["busy"]


def test_what_was_busy_long_ago_yields_to_what_is_busy_now():
    popularity = Popularity[str](half_life=8)
    for key in ["old"] * 50 + ["new"] * 30:
        popularity.use(key)
    assert popularity.busiest(2) == ["new", "old"]


def test_a_next_run_goes_on_where_the_last_one_ended():
    last = Popularity[str](half_life=8)
    for key in "aabac":
        last.use(key)
    following = Popularity[str](half_life=8)
    following.restore(last.snapshot())
    last.use("c")
    following.use("c")
    assert {key: following.value(key) for key in "abc"} == pytest.approx({key: last.value(key) for key in "abc"})


def test_memory_is_bounded_and_keeps_the_busiest():
    popularity = Popularity[int](half_life=1_000, max_keys=10)
    for _ in range(5):
        popularity.use(-1)
    for key in range(1_000):
        popularity.use(key)
    assert len(popularity.snapshot()) <= 10
    assert popularity.value(-1) > 0


@given(st.lists(st.integers(0, 5), max_size=300), st.floats(0.05, 50))
def test_the_value_is_the_sum_of_halved_uses(uses: list[int], half_life: float):
    popularity = Popularity[int](half_life)
    for key in uses:
        popularity.use(key)
    for key in range(6):
        expected = sum(2 ** -((len(uses) - 1 - at) / half_life) for at, used in enumerate(uses) if used == key)
        assert popularity.value(key) == pytest.approx(expected, rel=1e-6, abs=1e-12)
