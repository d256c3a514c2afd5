"""The gate: which version an alias may move to, and why not."""

from __future__ import annotations

import pytest

from adapters.errors import InvalidRequest
from training.publishing import Gate, Incumbent, Score, judge

GATE = Gate("solve", min_solve_rate=0.5)
MEASURED = {"set": "easy-64", "decoding": "sampled", "temperature": 0.7}


def codes(candidate: Score, incumbent: Incumbent | None = None, gate: Gate = GATE) -> tuple[str, ...]:
    return tuple(reason.code for reason in judge(gate, candidate, incumbent).reasons)


def named(rate: float | None, **others) -> Incumbent:
    return Incumbent(3, Score(rate, others.pop("measured", {})), **others)


def test_what_solves_enough_takes_an_alias_that_names_nothing():
    assert judge(GATE, Score(0.5), None).promotes


def test_what_solves_more_than_the_incumbent_is_promoted():
    assert judge(GATE, Score(0.75), named(0.7)).promotes


def test_below_the_minimum_nothing_is_promoted_even_where_the_alias_names_nothing():
    assert codes(Score(0.49)) == ("below_minimum",)


def test_a_tie_leaves_users_where_they_are():
    assert codes(Score(0.75), named(0.75)) == ("not_better",)


def test_all_reasons_are_told():
    assert codes(Score(0.4), named(0.9)) == ("below_minimum", "not_better")


def test_the_limit_and_the_value_stand_in_the_reason():
    (reason,) = judge(GATE, Score(0.25), None).reasons
    assert "0.2500" in reason.message
    assert "0.5000" in reason.message


@pytest.mark.parametrize("rate", [None, float("nan"), float("inf")])
def test_what_was_not_evaluated_is_not_promoted(rate):
    assert codes(Score(rate)) == ("not_evaluated",)


def test_an_incumbent_of_which_nothing_is_known_stays():
    assert codes(Score(1.0), named(None)) == ("unknown",)


def test_rates_that_were_measured_in_two_ways_are_not_compared():
    greedy = named(0.6, measured=MEASURED | {"decoding": "greedy"})
    assert codes(Score(0.9, MEASURED), greedy) == ("measured_otherwise",)
    assert "decoding greedy and not sampled" in judge(GATE, Score(0.9, MEASURED), greedy).reasons[0].message


def test_a_rate_of_which_nobody_said_how_it_was_measured_is_believed():
    assert judge(GATE, Score(0.9, MEASURED), named(0.6)).promotes


def test_a_trial_on_shared_traffic_is_left_to_who_began_it():
    assert codes(Score(1.0), named(0.1, is_shared=True)) == ("shared",)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_minimum_that_is_no_share_is_refused_by_name(rate):
    with pytest.raises(InvalidRequest, match="min_solve_rate"):
        Gate("solve", rate)
