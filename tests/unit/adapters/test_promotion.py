"""A promotion that waits: what is decided about it, and how it ends once, whoever ends it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import errors
from adapters.registry import aliases, promotion
from adapters.registry.moments import unix_s
from adapters.registry.promotion import Fail, Move, Wait, begun, decide, failed, finished, outcome, taken
from adapters.types import By, Directive, Head, HistoryRow, PendingMove

AT, DEADLINE, LATER = "2026-06-01T12:00:00.000000Z", "2026-06-01T12:01:00.000000Z", "2026-06-01T12:02:00.000000Z"
NOW_S = unix_s(AT)
MOVE = PendingMove("m1", "production", 2, None, DEADLINE, AT, "ann", "better")
ROW = HistoryRow(None, None, None, AT, "bob")
HEAD = Head("b", "n", aliases={"production": 1}, pending={"production": MOVE})
ANYBODY = By("bob")


def decided(ready: int, *, min_ready: int | None = None, old: int = 0, live: int = 4, failure: str | None = None, at: float = 0):
    return decide(replace(MOVE, min_ready=min_ready), ready, old, live, failure, NOW_S + at)


class TestDecide:
    @pytest.mark.parametrize(
        ("ready", "given", "expected"),
        [
            (0, {}, Wait(0, 1)),
            (1, {}, Move()),
            (1, {"old": 3}, Wait(1, 3)),
            (3, {"old": 3}, Move()),
            (1, {"min_ready": 2, "old": 1}, Wait(1, 2)),
            (2, {"min_ready": 2, "old": 4}, Move()),
            (4, {"min_ready": 9}, Move()),
            (3, {"min_ready": 9}, Wait(3, 4)),
            (2, {"old": 7, "live": 2}, Move()),
        ],
    )
    def test_it_waits_for_as_many_as_are_asked_for_or_hold_the_old_one(self, ready: int, given: dict, expected: Any) -> None:
        assert decided(ready, **given) == expected

    def test_with_no_replica_it_moves_at_once_and_says_so(self) -> None:
        move = decided(0, live=0, old=0)
        assert isinstance(move, Move) and "no replica" in (move.note or "")

    def test_what_can_not_be_loaded_fails_with_the_reason(self) -> None:
        assert decided(0, failure="rank 64 is over 32") == Fail("rank 64 is over 32")

    def test_enough_replicas_outweigh_one_that_failed(self) -> None:
        assert decided(1, failure="out of memory") == Move()

    def test_the_deadline_ends_it_with_numbers(self) -> None:
        assert decided(1, min_ready=2, at=59.9) == Wait(1, 2)
        assert decided(1, min_ready=2, at=60) == Fail("1 of 2 replicas had it in their engines after 60 s")
        assert decided(2, min_ready=2, at=60) == Move()


class TestNewMove:
    def test_it_has_a_deadline_and_an_id_of_its_own(self) -> None:
        first, second = (promotion.new_move("canary", 3, By("ann", "m"), AT, min_ready=2, timeout_s=60) for _ in "ab")
        assert (first.deadline, first.who, first.message, first.taken_by) == (DEADLINE, "ann", "m", None)
        assert first.id != second.id

    @pytest.mark.parametrize("given", [{"min_ready": 0}, {"min_ready": 10_001}, {"min_ready": True}])
    @pytest.mark.parametrize("timeout_s", [60.0])
    def test_min_ready_without_sense_is_refused(self, given: dict, timeout_s: float) -> None:
        with pytest.raises(errors.InvalidRequest, match="min_ready"):
            promotion.new_move("canary", 3, ANYBODY, AT, timeout_s=timeout_s, **given)

    @pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 24 * 3600 + 1])
    def test_a_timeout_without_sense_is_refused(self, timeout_s: float) -> None:
        with pytest.raises(errors.InvalidRequest, match="timeout_s"):
            promotion.new_move("canary", 3, ANYBODY, AT, min_ready=None, timeout_s=timeout_s)


class TestBegin:
    def test_the_alias_stays_and_the_move_is_pending(self) -> None:
        head = begun(replace(HEAD, pending={}), MOVE, ANYBODY)
        assert (head.aliases, head.pending, head.history) == ({"production": 1}, {"production": MOVE}, ())

    def test_the_same_version_joins(self) -> None:
        assert begun(HEAD, replace(MOVE, id="m2"), ANYBODY) is None

    def test_the_same_version_begins_anew_when_the_time_ran_out(self) -> None:
        head = begun(HEAD, replace(MOVE, id="m2", at=LATER), ANYBODY)
        assert head.pending["production"].id == "m2"
        assert (outcome(head, "m1").kind, outcome(head, "m1").message) == ("promote_failed", "version 2: the time ran out")

    def test_another_version_takes_over_and_the_first_ends_as_superseded(self) -> None:
        head = begun(HEAD, replace(MOVE, id="m2", version=3, who="bob"), ANYBODY)
        assert head.pending["production"].version == 3
        row = outcome(head, "m1")
        assert (row.kind, row.from_version, row.to_version, row.message) == (
            "promote_failed",
            1,
            1,
            "version 2: superseded by version 3",
        )

    def test_where_the_alias_is_there_nothing_is_begun_and_another_move_ends(self) -> None:
        assert begun(replace(HEAD, pending={}), replace(MOVE, version=1), ANYBODY) is None
        head = begun(HEAD, replace(MOVE, id="m2", version=1), ANYBODY)
        assert (head.pending, head.aliases, len(head.history)) == ({}, {"production": 1}, 1)

    def test_a_protected_alias_and_a_retired_version_are_refused(self) -> None:
        with pytest.raises(errors.Forbidden):
            begun(replace(HEAD, protected=frozenset({"production"})), MOVE, ANYBODY)
        with pytest.raises(errors.VersionRetired):
            begun(replace(HEAD, retired=frozenset({2})), MOVE, ANYBODY)
        assert begun(replace(HEAD, pending={}, protected=frozenset({"production"})), MOVE, By(unlock=True)) is not None


class TestEnd:
    def test_the_first_gateway_stays_the_one(self) -> None:
        head = taken(HEAD, "production", "m1", "gateway-1")
        assert head.pending["production"].taken_by == "gateway-1"
        assert taken(head, "production", "m1", "gateway-2") is None
        assert taken(HEAD, "production", "other", "gateway-2") is None

    def test_it_moves_in_the_name_of_who_began(self) -> None:
        head = finished(HEAD, "production", "m1", ROW, "no replica was live")
        assert (head.aliases, head.pending) == ({"production": 2}, {})
        row = outcome(head, "m1")
        assert (row.from_version, row.to_version, row.who) == (1, 2, "ann")
        assert row.message == "better; no replica was live"

    def test_done_already_is_success_and_ended_otherwise_is_not(self) -> None:
        done, lost = finished(HEAD, "production", "m1", ROW), failed(HEAD, "production", "m1", "no room", ROW)
        assert finished(done, "production", "m1", ROW) is None
        assert failed(lost, "production", "m1", "another reason", ROW) is None
        with pytest.raises(errors.VersionConflict, match="no room") as caught:
            finished(lost, "production", "m1", ROW)
        assert caught.value.reason == "move_failed"
        with pytest.raises(errors.VersionConflict, match="moved to version 2") as caught:
            failed(done, "production", "m1", "no room", ROW)
        assert caught.value.reason == "move_done"

    def test_who_waits_is_told_why_the_alias_stayed(self) -> None:
        promotion.check_moved(finished(HEAD, "production", "m1", ROW), MOVE)
        promotion.check_moved(HEAD, MOVE)
        lost = failed(HEAD, "production", "m1", "no room", ROW)
        with pytest.raises(errors.VersionConflict, match="stays at version 1; version 2: no room") as caught:
            promotion.check_moved(lost, MOVE)
        assert caught.value.reason == "promote_failed"

    def test_a_move_that_nobody_remembers_is_a_conflict(self) -> None:
        with pytest.raises(errors.VersionConflict) as caught:
            finished(HEAD, "production", "m9", ROW)
        assert caught.value.reason == "no_such_move"

    def test_a_failure_leaves_the_alias_and_says_why(self) -> None:
        head = failed(HEAD, "production", "m1", "rank 64 is over 32", replace(ROW, who=None))
        assert (head.aliases, head.pending) == ({"production": 1}, {})
        row = head.history[-1]
        assert (row.kind, row.who, row.message) == ("promote_failed", "ann", "version 2: rank 64 is over 32")

    def test_a_long_reason_is_cut_to_what_is_kept(self) -> None:
        head = failed(HEAD, "production", "m1", "x" * 5000, ROW)
        assert len(head.history[-1].message) == aliases.MAX_MESSAGE_CHARS

    def test_a_failure_is_no_move_to_go_back_to(self) -> None:
        head = finished(HEAD, "production", "m1", ROW)
        head = failed(replace(head, pending={"production": replace(MOVE, id="m2", version=3)}), "production", "m2", "no", ROW)
        assert aliases.rollback_target(head, "production") == 1
        assert aliases.live_at(head, "production", AT).to_version == 2
        assert aliases.were_live(head, "production") == [2]


class TestOtherChangesOfTheAlias:
    def test_promoted_at_once_to_the_same_version_is_the_move_done(self) -> None:
        head = aliases.moved(HEAD, "production", 2, replace(ROW, kind="promote"), ANYBODY)
        assert (head.pending, len(head.history)) == ({}, 1)
        assert (outcome(head, "m1").kind, outcome(head, "m1").who) == ("promote", "bob")
        assert finished(head, "production", "m1", ROW) is None

    @pytest.mark.parametrize(
        "change",
        [
            lambda head: aliases.moved(head, "production", 3, ROW, ANYBODY),
            lambda head: aliases.moved(head, "production", 1, ROW, ANYBODY),
            lambda head: aliases.shared(head, "production", {1: 1, 2: 1}, ROW, ANYBODY),
            lambda head: aliases.unset(head, "production", ROW, ANYBODY),
            lambda head: aliases.protected(head, "production", True, ROW),
        ],
        ids=["promoted elsewhere", "promoted to where it is", "shared", "unset", "protected"],
    )
    def test_any_other_ends_it_as_failed(self, change) -> None:
        head = change(HEAD)
        assert head.pending == {} and outcome(head, "m1").kind == "promote_failed"

    def test_moves_of_other_aliases_stay(self) -> None:
        other = replace(MOVE, id="m2", alias="canary")
        head = aliases.moved(replace(HEAD, pending=HEAD.pending | {"canary": other}), "production", 3, ROW, ANYBODY)
        assert head.pending == {"canary": other}

    def test_an_alias_that_was_never_there_can_be_unset_while_it_waits(self) -> None:
        head = aliases.unset(replace(HEAD, aliases={}), "production", ROW, ANYBODY)
        assert (head.pending, outcome(head, "m1").to_version) == ({}, None)

    def test_an_alias_that_goes_takes_its_directives_along(self) -> None:
        kept = Directive("2", "disk", True)
        head = replace(HEAD, directives=(Directive("production", "engine", True), kept))
        assert aliases.unset(head, "production", ROW, ANYBODY).directives == (kept,)


class TestWhatHoldsAVersion:
    @pytest.mark.parametrize("change", [aliases.retired, aliases.collected])
    def test_a_pin_and_a_pending_move_refuse_with_their_reasons(self, change) -> None:
        pinned = replace(HEAD, directives=(Directive("3", "disk", True), Directive("4", "engine", False)))
        for version, reason in ((1, "in_use"), (2, "pending"), (3, "pinned")):
            with pytest.raises(errors.InvalidRequest) as caught:
                change(pinned, version, ROW)
            assert (caught.value.reason, caught.value.value) == (reason, version)

    @pytest.mark.parametrize("change", [aliases.retired, aliases.collected])
    def test_what_expired_holds_nothing_and_a_prewarm_goes_with_its_version(self, change) -> None:
        over = replace(HEAD, directives=(Directive("3", "disk", True, until=AT), Directive("4", "engine", False)))
        assert change(over, 3, ROW).retired == {3}
        assert change(over, 4, ROW).directives == over.directives[:1]
        assert change(HEAD, 2, replace(ROW, at=LATER)).retired == {2}

    def test_a_move_whose_version_went_after_its_deadline_can_only_fail(self) -> None:
        gone = aliases.retired(HEAD, 2, replace(ROW, at=LATER))
        with pytest.raises(errors.VersionRetired):
            finished(gone, "production", "m1", ROW)
        assert failed(gone, "production", "m1", "retired", ROW).pending == {}


VERSIONS, ALIASES = (1, 2, 3), ("production", "canary")
_versions, _aliases = st.sampled_from(VERSIONS), st.sampled_from(ALIASES)
_step = st.one_of(
    st.tuples(st.sampled_from(["begin", "promote", "weights"]), _aliases, _versions),
    st.tuples(st.sampled_from(["finish", "fail", "rollback", "unset", "protect", "unprotect"]), _aliases, st.just(0)),
    st.tuples(st.sampled_from(["retire", "restore", "collect"]), st.just(""), _versions),
)


class TestAnySequence:
    """Whatever people and gateways do, in whatever order: a move ends once, and nothing is served that is gone."""

    @given(st.lists(_step, max_size=30))
    def test_holds_what_must(self, steps: list[tuple[str, str, int]]) -> None:
        head, began = Head("b", "n"), set[PendingMove]()
        for number, (verb, alias, version) in enumerate(steps):
            with contextlib.suppress(errors.LoraMuxError):
                head = _done(head, verb, alias, version, move_id=f"m{number}") or head
            began |= set(head.pending.values())
            self.check(head, began)

    def check(self, head: Head, began: set[PendingMove]) -> None:
        served = {*head.aliases.values(), *(version for shares in head.weights.values() for version in shares)}
        assert not head.retired & (served | {move.version for move in head.pending.values()})
        assert all(head.pending[alias].alias == alias for alias in head.pending)
        for move in began:
            ends = [row for row in head.history if row.move_id == move.id]
            assert len(ends) + (head.pending.get(move.alias) == move) == 1
            assert all(row.kind != "promote_failed" or row.from_version == row.to_version for row in ends)
        for alias in ALIASES:
            told = aliases.live_at(head, alias, DEADLINE)
            assert (told.to_version if told else None) == head.aliases.get(alias)


def _done(head: Head, verb: str, alias: str, version: int, move_id: str) -> Head | None:
    """One step as the registry makes it. Raises what that raises."""
    row = replace(ROW, kind=verb)
    waiting = head.pending.get(alias)
    change = {
        "begin": lambda: begun(head, PendingMove(move_id, alias, version, None, DEADLINE, AT), ANYBODY),
        "promote": lambda: aliases.moved(head, alias, version, row, ANYBODY),
        "weights": lambda: aliases.shared(head, alias, {version: 1, 3: 1}, row, ANYBODY),
        "finish": lambda: finished(head, alias, waiting.id, row) if waiting else None,
        "fail": lambda: failed(head, alias, waiting.id, "no room", row) if waiting else None,
        "rollback": lambda: aliases.moved(head, alias, aliases.rollback_target(head, alias), row, ANYBODY),
        "unset": lambda: aliases.unset(head, alias, row, ANYBODY),
        "protect": lambda: aliases.protected(head, alias, True, row),
        "unprotect": lambda: aliases.protected(head, alias, False, row),
        "retire": lambda: aliases.retired(head, version, row),
        "restore": lambda: aliases.restored(head, version, row),
        "collect": lambda: aliases.collected(head, version, row),
    }
    return change[verb]()
