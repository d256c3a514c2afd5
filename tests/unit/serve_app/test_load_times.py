"""Estimates of the next load."""

from __future__ import annotations

import pytest

from serve_app.slots.load_times import FIRST_GUESS_S, LoadTimes


def test_before_anything_was_measured_there_is_a_guess():
    assert LoadTimes().estimate_s("disk", 1_000) == FIRST_GUESS_S


def test_a_load_from_the_store_costs_the_fetch_and_the_load_by_bytes():
    times = LoadTimes()
    times.fetched(3.0, 100)
    times.loaded(1.0, 100)
    assert times.estimate_s("disk", 200) == pytest.approx(2.0)
    assert times.estimate_s("remote", 200) == pytest.approx(8.0)


def test_newer_measurements_count_more():
    times = LoadTimes()
    for seconds in [10.0] + [1.0] * 30:
        times.loaded(seconds, 100)
    assert times.estimate_s("disk", 100) == pytest.approx(1.0, rel=0.05)
