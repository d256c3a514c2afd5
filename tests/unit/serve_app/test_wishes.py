"""What a replica should hold, decided from the registry's rows alone."""

from __future__ import annotations

from adapters.names import AdapterRef
from adapters.registry.moments import at_unix
from adapters.types import AdapterEntry, Directive, FileDigest, PendingMove, ResolvedAdapter, VersionEntry
from serve_app.residency.wishes import NO_SLOT, TOO_MANY_PINS, Seat, Wish, choose, of_publication, of_use, wishes_of

NOW_S = 1_800_000_000.0
ALONE = Seat(rank=0, world_size=1, slots=4)


def at(offset_s: float = 0) -> str:
    return at_unix(NOW_S + offset_s)


def entry(name: str = "maze", versions: int = 3, retired: tuple[int, ...] = (), **fields) -> AdapterEntry:
    files = (FileDigest("f", 10, "0"),)
    rows = {n: VersionEntry(n, f"{name}{n}", files, 8, at(), retired=n in retired) for n in range(1, versions + 1)}
    return AdapterEntry("base", name, 1, fields.pop("aliases", {"production": 1}), rows, **fields)


def pin(target: str = "production", tier: str = "engine", **fields) -> Directive:
    return Directive(target=target, tier=tier, pin=True, at=at(-100), **fields)


def prewarm(target: str = "production", tier: str = "engine", **fields) -> Directive:
    return Directive(target=target, tier=tier, pin=False, at=at(-100), **fields)


def move(version: int, **fields) -> PendingMove:
    values = {"id": "m1", "alias": "production", "min_ready": None, "deadline": at(60), "at": at()} | fields
    return PendingMove(version=version, **values)


def wishes(row: AdapterEntry, seat: Seat = ALONE, resident: tuple[str, ...] = (), now_s: float = NOW_S) -> dict[int, Wish]:
    found = wishes_of(row, seat, [AdapterRef.parse(ref) for ref in resident], now_s)
    return {wish.ref.version: wish for wish in found}


def wish(name: str, cause: str = "pin", tier: str = "engine", held: bool = True, when: str = "") -> Wish:
    ref = AdapterRef("base", name, 1)
    return Wish(ResolvedAdapter(ref, name, (), 8), tier, held, cause, f"{cause} {name}", when)


class TestDirectives:
    def test_a_pin_on_an_alias_holds_the_version_that_the_alias_names(self):
        found = wishes(entry(aliases={"production": 2}, directives=(pin(),)))
        assert list(found) == [2]
        assert (found[2].tier, found[2].held, found[2].cause) == ("engine", True, "pin")

    def test_a_pin_on_a_shared_alias_holds_all_versions_that_get_requests(self):
        row = entry(weights={"production": {1: 90, 3: 10}}, directives=(pin(),))
        assert set(wishes(row)) == {1, 3}

    def test_a_prewarm_is_wished_for_without_a_hold(self):
        found = wishes(entry(directives=(prewarm("2", "disk"),)))
        assert (found[2].tier, found[2].held, found[2].cause) == ("disk", False, "prewarm")

    def test_nothing_is_wished_for_outside_of_the_window(self):
        row = entry(directives=(pin("2", start=at(10), until=at(20)),))
        assert [bool(wishes(row, now_s=NOW_S + moment)) for moment in (0, 10, 15, 20)] == [False, True, True, False]

    def test_a_schedule_is_a_new_wish_in_each_of_its_windows(self):
        row = entry(directives=(prewarm("2", start=at(), until=at(60), every_s=3600),))
        first, again, later = (wishes(row, now_s=NOW_S + moment) for moment in (1, 30, 3601))
        assert first[2].key == again[2].key != later[2].key
        assert wishes(row, now_s=NOW_S + 100) == {}

    def test_a_retired_version_is_no_longer_wished_for(self):
        assert wishes(entry(retired=(2,), directives=(pin("2"),))) == {}

    def test_a_directive_for_two_of_three_replicas_is_followed_by_two(self):
        row = entry(directives=(pin("2", replicas=2),))
        assert [bool(wishes(row, Seat(rank, 3, 4))) for rank in range(3)].count(True) == 2


class TestMoves:
    def test_the_new_version_is_warmed_where_the_old_one_is(self):
        row = entry(pending={"production": move(2)})
        found = wishes(row, Seat(7, 8, 4), resident=("base:maze@1",))
        assert (found[2].tier, found[2].held, found[2].move_id) == ("engine", True, "m1")

    def test_one_replica_warms_it_when_none_has_the_old_one(self):
        row = entry(pending={"production": move(2)})
        assert [bool(wishes(row, Seat(rank, 3, 4))) for rank in range(3)].count(True) == 1

    def test_as_many_replicas_warm_it_as_the_move_needs(self):
        row = entry(pending={"production": move(2, min_ready=2)})
        assert [bool(wishes(row, Seat(rank, 3, 4))) for rank in range(3)].count(True) == 2

    def test_another_move_to_the_same_version_is_another_wish(self):
        keys = {wishes(entry(pending={"production": move(2, id=name)}))[2].key for name in ("m1", "m2")}
        assert len(keys) == 2


class TestPublications:
    ADAPTER = ResolvedAdapter(AdapterRef("base", "maze", 3), "d", (), 8)

    def test_a_new_version_comes_to_the_disk_of_one_replica(self):
        found = [of_publication(entry(), self.ADAPTER, Seat(rank, 5, 4), ()) for rank in range(5)]
        assert [wish.tier for wish in found if wish] == ["disk"]

    def test_it_comes_to_every_replica_that_has_another_version_in_its_engine(self):
        resident = [AdapterRef("base", "maze", 2)]
        assert all(of_publication(entry(), self.ADAPTER, Seat(rank, 5, 4), resident) for rank in range(5))


class TestChoice:
    def test_one_place_is_left_for_requests(self):
        wanted = choose([wish(name, when=name) for name in "abcd"], slots=4)
        assert [(ref.name, tier) for ref, tier in wanted] == [(name, "engine") for name in "abc"] + [("d", "disk")]
        assert wanted[AdapterRef("base", "d", 1), "disk"].short == TOO_MANY_PINS
        assert all(wish.held for wish in wanted.values())

    def test_a_single_slot_is_never_held(self):
        (found,) = choose([wish("a")], slots=1).values()
        assert (found.tier, found.short) == ("disk", TOO_MANY_PINS)

    def test_a_single_slot_still_takes_a_promotion(self):
        (found,) = choose([wish("a", "promote")], slots=1).values()
        assert (found.tier, found.held) == ("engine", False)

    def test_a_promotion_goes_before_pins_and_pins_before_prewarms(self):
        wanted = choose([wish("warm", "prewarm", held=False), wish("pin1"), wish("pin2"), wish("move", "promote")], slots=3)
        assert [(w.ref.name, w.tier, w.held) for w in wanted.values()] == [
            ("move", "engine", True),
            ("pin1", "engine", True),
            ("pin2", "disk", True),
            ("warm", "engine", False),
        ]

    def test_prewarms_that_would_push_each_other_out_stay_on_the_disk(self):
        wanted = choose([wish(name, "prewarm", held=False) for name in "abc"], slots=2)
        assert [(w.ref.name, w.tier, w.short) for w in wanted.values()] == [
            ("a", "engine", None),
            ("b", "engine", None),
            ("c", "disk", NO_SLOT),
        ]

    def test_several_wishes_for_one_adapter_take_one_place_and_the_most_urgent_tells(self):
        adapter = wish("a").adapter
        wanted = choose([of_use(adapter), wish("a", "prewarm", held=False), wish("a"), wish("b", when="2")], slots=3)
        assert [(w.ref.name, w.cause, w.held) for w in wanted.values()] == [("a", "pin", True), ("b", "pin", True)]

    def test_a_disk_pin_keeps_its_hold_beside_a_prewarm_of_the_engine(self):
        wanted = choose([wish("a", tier="disk"), wish("a", "prewarm", held=False)], slots=3)
        assert {tier: w.held for (_, tier), w in wanted.items()} == {"disk": True, "engine": False}
