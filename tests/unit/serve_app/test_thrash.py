"""The thrash watch: what comes back soon after it went, and when that is an alarm."""

from __future__ import annotations

from serve_app.slots.thrash import ThrashWatch


def alternate(watch: ThrashWatch, loads: int, start_s: float = 0.0) -> list[tuple[int, int]]:
    """Adapters that push each other out, one load a second; gives the alarms."""
    alarms = []
    for index in range(loads):
        now_s = start_s + index
        watch.loaded(f"a{index % 3}", now_s)
        watch.evicted(f"a{(index + 1) % 3}", now_s)
        if (alarm := watch.alarm(now_s)) is not None:
            alarms.append(alarm)
    return alarms


def test_a_load_soon_after_its_eviction_is_a_reload():
    watch = ThrashWatch(window_s=60)
    assert not watch.loaded("a", 0)
    watch.evicted("a", 10)
    assert watch.loaded("a", 69)


def test_a_load_long_after_its_eviction_is_none():
    watch = ThrashWatch(window_s=60)
    watch.evicted("a", 10)
    assert not watch.loaded("a", 70)


def test_adapters_that_push_each_other_out_raise_one_alarm_a_window():
    watch = ThrashWatch(window_s=60)
    assert len(alternate(watch, 60)) == 1
    assert len(alternate(watch, 60, start_s=60)) == 1


def test_new_adapters_one_after_the_other_raise_none():
    watch = ThrashWatch(window_s=60)
    for index in range(200):
        watch.loaded(f"new{index}", index / 10)
        watch.evicted(f"new{index}", index / 10 + 1)
        assert watch.alarm(index / 10) is None


def test_what_someone_evicted_on_purpose_is_no_reload():
    watch = ThrashWatch(window_s=60)
    watch.evicted("a", 10)
    watch.forgive("a")
    assert not watch.loaded("a", 11)


def test_a_few_reloads_raise_none():
    assert alternate(ThrashWatch(window_s=60), 6) == []


def test_what_it_remembers_is_bounded():
    watch = ThrashWatch()
    for index in range(10_000):
        watch.evicted(index, 0)
    assert not watch.loaded(0, 1)
    assert watch.loaded(9_999, 1)
