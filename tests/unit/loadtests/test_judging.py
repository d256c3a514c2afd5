"""Which sentence an adapter may say when, and what is made of a text."""

from __future__ import annotations

import pytest

from loadtests.running.judging import SEEN_WITHIN_S, Turn, is_right, sayings
from loadtests.sending import Sent
from loadtests.workload import HELLO, Planned

PLANNED = Planned(0, 0.0, "load", "pool", 0, None, HELLO, 16)
MOVED = Turn(began_s=10, done_s=11, sentence="new")


def sent(text: str, at_s: float, total_ms: float = 100, tokens: int = 4, status: int = 200) -> Sent:
    return Sent(0, sent_s=at_s, status=status, ttft_ms=10, total_ms=total_ms, tokens=tokens, text=text)


@pytest.mark.parametrize(
    ("text", "at_s", "right"),
    [
        ("old", 5, True),
        ("new", 5, False),
        ("old", 10.5, True),
        ("new", 10.5, True),
        ("old", 11 + SEEN_WITHIN_S - 0.1, True),
        ("old", 11 + SEEN_WITHIN_S + 0.1, False),
        ("new", 20, True),
        ("other", 20, False),
    ],
)
def test_old_content_is_right_until_everybody_has_to_see_the_new(text: str, at_s: float, right: bool):
    assert is_right(PLANNED, sent(text, at_s), sayings("old", [MOVED])) is right


def test_a_request_that_was_under_way_when_content_changed_may_say_the_new():
    assert is_right(PLANNED, sent("new", 9.5, total_ms=1000), sayings("old", [MOVED]))


def test_a_change_that_failed_may_have_been_made():
    may_say = sayings("old", [Turn(10, None, "new")])
    assert is_right(PLANNED, sent("old", 50), may_say)
    assert is_right(PLANNED, sent("new", 50), may_say)


def test_of_several_changes_only_the_last_is_right_in_the_end():
    may_say = sayings("old", [Turn(30, 31, "newest"), MOVED])
    assert [is_right(PLANNED, sent(text, 50), may_say) for text in ("old", "new", "newest")] == [False, False, True]


def test_a_sentence_that_its_limit_cut_off_is_right_as_far_as_it_goes():
    assert is_right(PLANNED, sent("the ship leaves", 0, tokens=16), sayings("the ship leaves at dawn", []))
    assert not is_right(PLANNED, sent("the ship leaves", 0, tokens=3), sayings("the ship leaves at dawn", []))


def test_nothing_is_judged_without_an_answer_or_without_a_sentence():
    assert is_right(PLANNED, sent("", 0, status=503), sayings("old", [])) is None
    assert is_right(PLANNED, Sent(0), sayings("old", [])) is None
    assert is_right(PLANNED, sent("anything", 0), sayings(None, [])) is None
    assert is_right(PLANNED, sent("anything", 0), ()) is None
