"""Directives: what is allowed, when one holds, for which versions, and when pins are too many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters import errors
from adapters.registry import directives
from adapters.registry.moments import at_unix, unix_s
from adapters.types import AdapterEntry, By, Directive, FileDigest, Head, VersionEntry

BASE, NAME = "Qwen/Qwen3-0.6B", "maze"
AT = "2026-06-01T12:00:00.000000Z"
NOW_S = unix_s(AT)
HOUR_S, DAY_S = 3600, 24 * 3600
ANN = By("ann", "busy at noon")


def pin(target: str = "1", tier: Any = "engine", **rest: Any) -> Directive:
    return Directive(target, tier, pin=True, **rest)


def prewarm(target: str = "1", tier: Any = "engine", **rest: Any) -> Directive:
    return Directive(target, tier, pin=False, **rest)


def after(seconds: float) -> str:
    return at_unix(NOW_S + seconds)


def checked(directive: Directive) -> Directive:
    return directives.checked(directive, ANN, AT)


def entry(name: str = NAME, versions: int = 3, *pins: Directive, retired: tuple[int, ...] = (), **more: Any) -> AdapterEntry:
    files = (FileDigest("f", 1, "0"),)
    rows = {n: VersionEntry(n, f"d{n}", files, 8, "2026", retired=n in retired) for n in range(1, versions + 1)}
    return AdapterEntry(BASE, name, 1, more.pop("aliases", {}), rows, directives=pins, **more)


class TestWindow:
    def test_without_bounds_it_is_always_open(self) -> None:
        assert directives.active(pin(), NOW_S) and not directives.expired(pin(), NOW_S)

    def test_from_its_start_until_its_end(self) -> None:
        window = pin(start=after(10), until=after(20))
        assert [directives.active(window, NOW_S + s) for s in (9, 10, 19, 20)] == [False, True, True, False]
        assert [directives.expired(window, NOW_S + s) for s in (9, 19, 20)] == [False, False, True]

    def test_a_schedule_comes_back_and_never_expires(self) -> None:
        daily = pin(start=after(0), until=after(8 * HOUR_S), every_s=DAY_S)
        for day in (0, 1, 400):
            hours = [directives.active(daily, NOW_S + day * DAY_S + hour * HOUR_S) for hour in (0, 7.9, 8, 23)]
            assert hours == [True, True, False, False]
        assert not directives.active(daily, NOW_S - DAY_S) and not directives.expired(daily, NOW_S + 400 * DAY_S)


class TestVersionsMeant:
    def test_a_number_means_itself_while_it_lives(self) -> None:
        assert directives.versions_of("2", entry()) == (2,)
        assert directives.versions_of("2", entry(retired=(2,))) == directives.versions_of("9", entry()) == ()

    def test_an_alias_means_what_it_names_now(self) -> None:
        assert directives.versions_of("canary", entry(aliases={"canary": 3})) == (3,)
        assert directives.versions_of("canary", entry()) == ()

    def test_an_alias_that_shares_its_traffic_means_all_that_share(self) -> None:
        shared = entry(aliases={"canary": 3}, weights={"canary": {3: 90, 1: 10}})
        assert directives.versions_of("canary", shared) == (1, 3)

    def test_latest_follows_the_newest(self) -> None:
        assert directives.versions_of("latest", entry(retired=(3,))) == (2,)


class TestChecked:
    def test_it_says_who_when_and_why_in_one_form_of_time(self) -> None:
        given = pin("07", start="2026-06-01T16:00:00+02:00", until="2026-06-02T00:00:00Z", who="mallory", at="1999")
        wanted = pin("7", start=after(2 * HOUR_S), until=after(12 * HOUR_S), at=AT, who="ann", message="busy at noon")
        assert checked(given) == wanted

    def test_a_prewarm_of_a_number_ends_by_itself(self) -> None:
        assert checked(prewarm()).until == after(directives.PREWARM_LIFE_S)
        assert checked(prewarm(start=after(60))).until == after(60 + directives.PREWARM_LIFE_S)

    def test_a_pin_and_what_follows_an_alias_stay(self) -> None:
        assert checked(pin()).until is checked(prewarm("canary")).until is checked(prewarm("latest")).until is None

    def test_a_schedule_without_a_start_begins_now(self) -> None:
        assert checked(pin(until=after(HOUR_S), every_s=DAY_S)).start == AT

    @pytest.mark.parametrize(
        ("directive", "param"),
        [
            (pin("v7"), "alias"),
            (pin("Nope"), "alias"),
            (pin(tier="remote"), "tier"),
            (pin(replicas=0), "replicas"),
            (pin(replicas=10_001), "replicas"),
            (pin(until="tomorrow"), "until"),
            (pin(until="2026-07-01T00:00:00"), "until"),
            (pin(until=after(0)), "until"),
            (pin(start=after(20), until=after(10)), "until"),
            (pin(every_s=DAY_S), "until"),
            (pin(until=after(5), every_s=59), "every_s"),
            (pin(until=after(DAY_S), every_s=DAY_S), "every_s"),
        ],
    )
    def test_what_makes_no_sense_is_refused_by_name(self, directive: Directive, param: str) -> None:
        with pytest.raises(errors.InvalidRequest) as caught:
            checked(directive)
        assert caught.value.param == param

    def test_a_schedule_may_have_begun_long_ago(self) -> None:
        old = pin(start="2020-01-01T08:00:00Z", until="2020-01-01T18:00:00Z", every_s=DAY_S)
        assert directives.active(checked(old), NOW_S)


class TestOnAHead:
    def head(self, *known: Directive, **more: Any) -> Head:
        return Head(BASE, NAME, directives=known, **more)

    def test_the_same_target_pin_and_tier_takes_the_place(self) -> None:
        head = self.head(pin(replicas=1), pin(tier="disk"), prewarm(until=after(5)))
        changed = directives.directed(head, pin(replicas=2), NOW_S)
        assert changed.directives == (pin(tier="disk"), prewarm(until=after(5)), pin(replicas=2))

    def test_a_pin_that_is_there_changes_nothing(self) -> None:
        assert directives.directed(self.head(pin(at="2026", who="ann")), pin(at=AT, who="bob"), NOW_S) is None

    def test_a_prewarm_asked_for_again_is_a_new_one(self) -> None:
        head = self.head(prewarm("canary", at="2026"), aliases={"canary": 1})
        assert directives.directed(head, prewarm("canary", at=AT), NOW_S).directives == (prewarm("canary", at=AT),)

    def test_an_alias_that_is_not_there_is_refused_and_those_that_are_told(self) -> None:
        with pytest.raises(errors.InvalidRequest, match="it has `production`") as caught:
            directives.directed(self.head(aliases={"production": 1}), pin("canary"), NOW_S)
        assert caught.value.reason == "no_such_alias"
        assert directives.directed(self.head(), pin("latest"), NOW_S) is not None

    def test_too_many_are_refused_with_numbers_and_expired_ones_do_not_count(self) -> None:
        full = self.head(*(pin(str(n)) for n in range(1, directives.MAX_DIRECTIVES + 1)))
        with pytest.raises(errors.InvalidRequest) as caught:
            directives.directed(full, pin("900"), NOW_S)
        assert (caught.value.limit, caught.value.value) == (64, 64)
        assert len(directives.directed(full, pin("1", replicas=3), NOW_S).directives) == 64
        over = replace(full, directives=(*full.directives[1:], pin("1", until=after(-1))))
        assert len(directives.directed(over, pin("900"), NOW_S).directives) == 64

    def test_taking_back_by_target_and_kind(self) -> None:
        head = self.head(pin(), pin(tier="disk"), prewarm(), pin("2"))
        assert directives.undirected(head, "1", pin=True).directives == (prewarm(), pin("2"))
        assert directives.undirected(head, "1", pin=False).directives == (pin(), pin(tier="disk"), pin("2"))
        assert directives.undirected(head, "1").directives == (pin("2"),)
        assert directives.undirected(head, "3") is None

    def test_what_a_head_holds_ends_with_the_window_and_follows_aliases(self) -> None:
        known = (pin("1", until=after(5)), pin("canary"), prewarm("3"), pin("4", start=after(50)))
        head = self.head(*known, aliases={"canary": 2}, weights={"canary": {2: 1, 5: 1}})
        assert directives.versions_held(head, NOW_S, pin=True) == {1, 2, 4, 5}
        assert directives.versions_held(head, NOW_S + 5, pin=True) == {2, 4, 5}
        assert directives.versions_held(head, NOW_S, pin=False) == {3}


def check(new: Directive, *entries: AdapterEntry, slots: int = 3, replicas: int = 2) -> None:
    directives.check_pins(entries, BASE, NAME, new, slots=slots, replicas=replicas, now_s=NOW_S)


def refused(new: Directive, *entries: AdapterEntry, **size: int) -> tuple[int, int]:
    """The limit and the value of the refusal."""
    with pytest.raises(errors.InvalidRequest) as caught:
        check(new, *entries, **size)
    assert caught.value.reason == "too_many_pins"
    assert (
        f"{caught.value.value} places" in caught.value.message and f"{caught.value.limit} can be pinned" in caught.value.message
    )
    return caught.value.limit, caught.value.value


class TestPinsAndSlots:
    def test_one_slot_of_each_replica_stays_free(self) -> None:
        check(pin("2"), entry(NAME, 3, pin("1")))
        assert refused(pin("3"), entry(NAME, 3, pin("1"), pin("2"))) == (4, 6)
        assert refused(pin("1"), entry(), slots=1) == (0, 2)

    def test_pins_of_all_adapters_of_the_base_count_and_no_others(self) -> None:
        other, elsewhere = entry("other", 3, pin("1"), pin("2")), replace(entry("x", 3, pin("1")), base="another")
        assert refused(pin(), entry(), other, elsewhere) == (4, 6)
        check(pin(), entry(), elsewhere)

    def test_fewer_replicas_take_fewer_places(self) -> None:
        check(pin("3", replicas=1), entry(NAME, 3, pin("1", replicas=1), pin("2")))
        assert refused(pin("3", replicas=9), entry(NAME, 3, pin("1", replicas=1), pin("2"))) == (4, 5)

    def test_an_alias_that_shares_takes_a_place_for_each_version(self) -> None:
        shared = entry(NAME, 3, aliases={"canary": 1}, weights={"canary": {1: 1, 2: 1, 3: 1}})
        assert refused(pin("canary"), shared) == (4, 6)

    def test_a_version_pinned_twice_takes_one_place(self) -> None:
        check(pin("canary"), entry(NAME, 3, pin("1"), pin("2"), aliases={"canary": 1}))

    def test_the_same_pin_is_replaced_and_not_counted_beside_itself(self) -> None:
        check(pin("1", replicas=2), entry(NAME, 3, pin("1"), pin("2")))

    def test_disk_pins_and_prewarms_take_no_place(self) -> None:
        check(pin(tier="disk"), entry(), slots=1)
        check(prewarm(), entry(), slots=1)
        check(pin("2"), entry(NAME, 3, pin("1", "disk"), prewarm("3")), slots=2)

    def test_without_a_replica_nothing_is_refused(self) -> None:
        check(pin(), entry(), slots=1, replicas=0)

    def test_pins_that_never_meet_share_their_places(self) -> None:
        day = pin("1", start=after(0), until=after(8 * HOUR_S), every_s=DAY_S)
        night = pin("2", start=after(8 * HOUR_S), until=after(20 * HOUR_S), every_s=DAY_S)
        check(night, entry(NAME, 3, day), slots=2)
        assert refused(replace(night, until=after(24.5 * HOUR_S), every_s=2 * DAY_S), entry(NAME, 3, day), slots=2) == (2, 4)

    def test_pins_that_meet_later_are_refused_now(self) -> None:
        soon = pin("2", start=after(DAY_S), until=after(2 * DAY_S))
        assert refused(pin("1"), entry(NAME, 3, soon), slots=2) == (2, 4)
        check(pin("1", until=after(DAY_S)), entry(NAME, 3, soon), slots=2)
