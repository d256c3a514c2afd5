"""Traces of requests."""

from __future__ import annotations

from collections import Counter

from loadtests.traces import draw, traces

NAMES = [f"a{number}" for number in range(16)]


def test_the_same_seed_draws_the_same_trace():
    assert draw(NAMES, 100, "zipf", 3) == draw(NAMES, 100, "zipf", 3)
    assert draw(NAMES, 100, "zipf", 3) != draw(NAMES, 100, "zipf", 4)


def test_zipf_asks_for_the_first_twice_as_often_as_for_the_second():
    (_, most), (_, next_) = Counter(draw(NAMES, 50_000, "zipf", 1)).most_common(2)
    assert 1.9 < most / next_ < 2.1


def test_uniform_asks_for_all_alike():
    counts = Counter(draw(NAMES, 50_000, "uniform", 1))
    assert len(counts) == len(NAMES)
    assert max(counts.values()) / min(counts.values()) < 1.2


def test_a_popular_name_is_not_the_first_one_published():
    most = {Counter(draw(NAMES, 1000, "zipf", seed)).most_common(1)[0][0] for seed in range(20)}
    assert len(most) > 5


def test_each_multiple_of_the_slots_has_its_adapters_and_the_first_one_trace():
    drawn = traces(NAMES, 4, (1, 2), 10, 7)
    assert [str(trace) for trace in drawn] == ["1x uniform", "2x zipf", "2x uniform"]
    assert [len(trace.adapters) for trace in drawn] == [4, 8, 8]
    assert all(set(trace.names) <= set(trace.adapters) and len(trace.names) == 10 for trace in drawn)
