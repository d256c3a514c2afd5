"""Which replica the router chooses, from what replicas reported and what it sent itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.types import Directive
from serve_app.routing.placement import OUT_OF_REACH, Choice, Placement, Reported, assigned, ranks_of

ROOM = 8
REF = "demo:gold@1"
OTHER = "demo:silver@1"
REFS = [f"demo:a{number}@1" for number in range(200)]

ranks = st.integers(min_value=2, max_value=8)
refs = st.from_regex(r"demo:[a-z]{1,8}@[1-9]", fullmatch=True)


class Replicas:
    """Up to eight scripted replicas that hold and do what a test says; `ask` sends one request and counts it as running."""

    def __init__(self, count: int, *, room: int = ROOM, slots: int | None = None) -> None:
        self.placement = Placement(room)
        self.slots = slots
        self.engine: dict[str, set[str]] = {f"r{rank}": set() for rank in range(count)}
        self.loading: dict[str, set[str]] = {name: set() for name in self.engine}
        self.load: Counter[str] = Counter()
        self.added: list[str] = []
        self._next = 0
        self.report()

    def report(self) -> None:
        self.placement.update(
            {
                name: Reported(int(name[1:]), frozenset(refs), frozenset(self.loading[name]), self.slots)
                for name, refs in self.engine.items()
            }
        )

    def hold(self, ref: str, *names: str) -> None:
        for name in names:
            self.engine[name].add(ref)
        self.report()

    def lose(self, name: str) -> None:
        del self.engine[name]
        self.report()

    def choose(self, ref: str | None) -> Choice:
        return self.placement.choose(ref, lambda name: self.load[name])

    def ask(self, ref: str | None) -> str:
        choice = self.choose(ref)
        self._next += 1
        self.placement.begin(str(self._next), ref, choice.replica)
        self.load[choice.replica] += 1
        if choice.add:
            self.added.append(choice.add)
        return choice.replica

    def ask_all(self, ref: str | None, count: int) -> Counter[str]:
        return Counter(self.ask(ref) for _ in range(count))

    def finish(self, name: str, count: int) -> None:
        """So many of the replica's requests end."""
        running = [one for one, flight in self.placement.flights.items() if flight.replica == name][:count]
        for request_id in running:
            self.placement.end(request_id)
        self.load[name] -= len(running)


# -- owners ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(refs, ranks)
def test_all_ranks_own_a_ref_in_one_order_that_everybody_finds(ref: str, count: int):
    assert sorted(ranks_of(ref, range(count))) == list(range(count))
    assert ranks_of(ref, range(count)) == ranks_of(ref, reversed(range(count)))


@settings(deadline=None)
@given(refs, ranks, st.data())
def test_without_one_rank_the_others_keep_their_order(ref: str, count: int, data):
    gone = data.draw(st.integers(0, count - 1))
    assert ranks_of(ref, set(range(count)) - {gone}) == [rank for rank in ranks_of(ref, range(count)) if rank != gone]


@settings(deadline=None)
@given(ranks, st.data())
def test_a_replica_that_goes_moves_its_own_refs_only(count: int, data):
    replicas = Replicas(count)
    before = {ref: replicas.choose(ref).replica for ref in REFS}
    gone = data.draw(st.sampled_from(sorted(replicas.engine)))
    replicas.lose(gone)
    assert all(replicas.choose(ref).replica == owner for ref, owner in before.items() if owner != gone)


@settings(deadline=None)
@given(ranks)
def test_owners_share_the_refs_evenly(count: int):
    shares = Counter(ranks_of(ref, range(count))[0] for ref in REFS)
    assert max(shares.values()) < 2.2 * len(REFS) / count


def test_routers_that_never_talk_choose_the_same_owner():
    one, other = Replicas(5), Replicas(5)
    assert [one.choose(ref) for ref in REFS] == [other.choose(ref) for ref in REFS]


def test_a_replica_in_the_place_of_a_dead_one_owns_what_that_owned():
    replicas = Replicas(3)
    before = [replicas.choose(ref).replica for ref in REFS]
    replicas.placement.update({"r0": Reported(0), "replacement": Reported(1), "r2": Reported(2)})
    assert [replicas.choose(ref).replica.replace("replacement", "r1") for ref in REFS] == before


def test_a_replica_that_has_not_told_its_rank_owns_nothing_while_others_have():
    replicas = Replicas(2)
    replicas.placement.update({"r0": Reported(0), "r1": Reported(1), "new": Reported()})
    assert "new" not in {replicas.choose(ref).replica for ref in REFS}


def test_replicas_that_never_tell_their_ranks_share_the_refs_all_the_same():
    placement = Placement(ROOM)
    placement.update({name: Reported.of(None) for name in "abc"})
    assert len({placement.choose(ref, lambda _: 0).replica for ref in REFS}) == 3


# -- directives ------------------------------------------------------------------------------------------------------


def directive(replicas: int | None) -> Directive:
    return Directive("production", "engine", pin=True, replicas=replicas)


@settings(deadline=None)
@given(refs, ranks, st.data())
def test_a_directive_for_some_replicas_is_meant_for_the_first_owners(ref: str, count: int, data):
    wanted = data.draw(st.integers(1, count))
    meant = {rank for rank in range(count) if assigned(directive(wanted), ref, rank, count)}
    assert meant == set(ranks_of(ref, range(count))[:wanted])


@settings(deadline=None)
@given(refs, ranks, st.data())
def test_replicas_that_think_they_are_fewer_are_meant_too_often_rather_than_too_seldom(ref: str, count: int, data):
    wanted = data.draw(st.integers(1, count))
    assert sum(assigned(directive(wanted), ref, rank, 1) for rank in range(count)) >= wanted


def test_a_directive_without_a_number_is_meant_for_all():
    assert all(assigned(directive(None), REF, rank, 3) for rank in range(3))


def test_where_a_directive_warmed_a_ref_the_router_would_have_sent_it():
    replicas = Replicas(4)
    for ref in REFS:
        (owner,) = [rank for rank in range(4) if assigned(directive(1), ref, rank, 4)]
        assert replicas.choose(ref).replica == f"r{owner}"


# -- first loads -----------------------------------------------------------------------------------------------------


def test_sixty_four_requests_for_a_cold_ref_go_to_one_replica():
    replicas = Replicas(3)
    assert len(replicas.ask_all(REF, 64)) == 1
    assert not replicas.added


def test_a_load_that_another_router_began_is_joined():
    replicas = Replicas(3)
    last_owner = replicas.placement.owners(REF)[-1]
    replicas.loading[last_owner].add(REF)
    replicas.report()
    assert replicas.choose(REF).replica == last_owner


def test_a_cold_ref_goes_past_an_owner_without_room():
    replicas = Replicas(3)
    first, second, _ = replicas.placement.owners(REF)
    replicas.load[first] = ROOM
    assert replicas.choose(REF).replica == second


def test_a_cold_ref_goes_to_the_least_loaded_when_nobody_has_room():
    replicas = Replicas(3)
    replicas.load.update(r0=ROOM + 3, r1=ROOM + 1, r2=ROOM + 2)
    assert replicas.choose(REF).replica == "r1"


def test_a_cold_ref_goes_past_an_owner_without_a_free_place_so_nothing_is_evicted_for_it():
    replicas = Replicas(3, slots=2)
    first, second, _ = replicas.placement.owners(REF)
    replicas.hold(OTHER, first)
    replicas.hold("demo:bronze@1", first)
    assert replicas.choose(REF).replica == second


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 6), st.booleans())
def test_as_many_refs_as_there_are_places_all_find_one(count: int, slots: int, reports_between: bool):
    replicas = Replicas(count, slots=slots)
    for ref in REFS[: count * slots]:
        name = replicas.ask(ref)
        replicas.finish(name, 1)
        replicas.engine[name].add(ref)
        if reports_between:
            replicas.report()
    assert {len(refs) for refs in replicas.engine.values()} == {slots}


def test_where_no_place_is_free_the_first_owner_gives_one_up():
    replicas = Replicas(2, slots=1)
    replicas.hold(OTHER, "r0")
    replicas.hold("demo:bronze@1", "r1")
    assert replicas.choose(REF).replica == replicas.placement.owners(REF)[0]


def test_a_load_that_never_shows_in_a_report_takes_no_place_for_long():
    replicas = Replicas(1, slots=2)
    replicas.ask(REF)
    for ref in REFS[:2]:
        replicas.hold(ref, "r0")
        replicas.engine["r0"].remove(ref)
    replicas.report()
    assert replicas.placement._has_place("r0")
    assert not replicas.placement._brought["r0"]


def test_a_ref_that_was_evicted_meanwhile_is_loaded_where_it_was_said_to_be():
    replicas = Replicas(3)
    replicas.hold(REF, "r2")
    replicas.engine["r2"].clear()  # and not reported yet
    assert replicas.ask_all(REF, ROOM).keys() == {"r2"}


# -- holders ---------------------------------------------------------------------------------------------------------


def test_a_holder_with_room_goes_before_the_owner():
    replicas = Replicas(3)
    last_owner = replicas.placement.owners(REF)[-1]
    replicas.hold(REF, last_owner)
    assert replicas.ask_all(REF, ROOM).keys() == {last_owner}


def test_full_holders_keep_their_requests_and_one_more_owner_is_added():
    replicas = Replicas(3)
    first, second, _ = replicas.placement.owners(REF)
    replicas.hold(REF, first)
    assert replicas.ask_all(REF, ROOM + 1) == {first: ROOM + 1}
    assert replicas.added == [second]


def test_no_owner_is_added_while_a_load_of_the_ref_runs():
    replicas = Replicas(3)
    first, second, _ = replicas.placement.owners(REF)
    replicas.hold(REF, first)
    replicas.loading[second].add(REF)
    replicas.report()
    replicas.ask_all(REF, 3 * ROOM)
    assert not replicas.added


def test_no_owner_is_added_that_has_little_room_itself():
    replicas = Replicas(2)
    first, second = replicas.placement.owners(REF)
    replicas.hold(REF, first)
    replicas.load[second] = ROOM - 2
    replicas.ask_all(REF, 2 * ROOM)
    assert not replicas.added


def test_demand_that_grows_and_shrinks_takes_and_leaves_replicas_without_flapping():
    replicas = Replicas(3)
    first, second, _ = replicas.placement.owners(REF)
    replicas.hold(REF, first)
    replicas.ask_all(REF, ROOM + 1)
    replicas.hold(REF, second)
    assert replicas.ask_all(REF, 4) == {second: 4}
    replicas.finish(first, 4)
    replicas.finish(second, 4)  # 5 are left at the first: more than `lean`, so what comes is shared
    assert replicas.ask(REF) == second
    replicas.finish(first, 4)
    replicas.finish(second, 1)
    assert replicas.ask_all(REF, 2) == {first: 2}
    assert len(replicas.added) == 1


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(2, 8))
def test_a_ref_that_all_hold_is_shared_within_a_quarter_of_the_room(count: int, number: int):
    replicas = Replicas(number)
    replicas.hold(REF, *replicas.engine)
    replicas.ask_all(REF, count)
    loads = [replicas.load[name] for name in replicas.engine]
    if sum(loads) < number * ROOM:
        assert max(loads) - min(loads) <= replicas.placement.lean + 1


# -- the base, and what is out of reach -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_requests_to_the_base_are_shared_evenly(count: int):
    replicas = Replicas(count)
    shares = replicas.ask_all(None, 12 * count)
    assert len(shares) == count
    assert max(shares.values()) - min(shares.values()) <= 2


def test_a_replica_out_of_reach_is_chosen_by_nobody_even_where_it_holds_the_ref():
    replicas = Replicas(3)
    first, second, third = replicas.placement.owners(REF)
    replicas.hold(REF, first)
    replicas.load.update({first: OUT_OF_REACH})
    assert replicas.choose(REF).replica == second
    assert replicas.choose(None).replica in (second, third)


def test_the_last_replica_is_chosen_though_it_is_out_of_reach():
    replicas = Replicas(1)
    replicas.load.update(r0=OUT_OF_REACH)
    assert replicas.choose(REF).replica == replicas.choose(None).replica == "r0"


def test_a_replica_that_died_takes_its_reports_along():
    replicas = Replicas(2)
    replicas.hold(REF, "r0")
    replicas.placement.forget("r0")
    assert replicas.placement.holders(REF) == set()
    assert replicas.choose(REF).replica == "r1"


def test_without_replicas_there_is_nothing_to_choose():
    with pytest.raises(LookupError):
        Placement(ROOM).choose(REF, lambda _: 0)


# -- flights ---------------------------------------------------------------------------------------------------------


def test_requests_that_ended_leave_nothing_behind():
    replicas = Replicas(2)
    for number in range(50):
        placement, request_id = replicas.placement, f"x{number}"
        placement.begin(request_id, REF if number % 2 else None, "r0")
        placement.end(request_id)
        placement.end(request_id)
    assert not placement.flights
    assert placement.own("r0") == 0
    assert replicas.ask(REF) == placement.owners(REF)[0]


def test_a_request_that_is_given_anew_stands_once_and_the_late_end_of_the_try_before_does_not_end_it():
    replicas = Replicas(2)
    placement = replicas.placement
    placement.begin("x", REF, "r0")
    placement.begin("x", REF, "r1")
    placement.end("x", "r0")
    assert placement.flights["x"].replica == "r1"
    assert (placement.own("r0"), placement.own("r1")) == (0, 1)
    placement.end("x", "r1")
    assert not placement.flights
