"""Who gets which version while an alias shares its traffic."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import InvalidRequest
from adapters.registry.weights import MAX_SHARES, MAX_WEIGHT, check_weights, choose, point_of

KEYS = [f"user-{number}" for number in range(2000)]


def chosen(weights: dict[int, int]) -> dict[str, int]:
    return {key: choose(weights, point_of("demo:parrot", "production", key)) for key in KEYS}


@given(st.integers(1, 98), st.integers(1, 98))
def test_raising_the_newest_share_moves_nobody_back(first: int, second: int) -> None:
    less, more = sorted((first, second))
    before, after = chosen({7: 100 - less, 8: less}), chosen({7: 100 - more, 8: more})
    assert all(after[key] == 8 for key, version in before.items() if version == 8)


def test_shares_come_out_as_weighted() -> None:
    counts = Counter(chosen({7: 70, 8: 20, 9: 10}).values())
    assert abs(counts[9] - 200) < 60
    assert abs(counts[8] - 400) < 80


def test_a_key_stands_elsewhere_under_another_alias_or_adapter() -> None:
    points = {point_of(*where, "ann") for where in (("b:x", "production"), ("b:y", "production"), ("b:x", "canary"))}
    assert len(points) == 3


def test_a_key_keeps_its_place_in_every_release() -> None:
    assert point_of("demo:parrot", "production", "ann") == pytest.approx(0.7032, abs=1e-4)


def test_a_key_of_any_characters_has_a_place() -> None:
    assert 0 <= point_of("demo:parrot", "production", "\ud800 \0 ☃") < 1


@given(st.dictionaries(st.integers(1, 50), st.integers(1, 100), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_every_point_has_a_version(weights: dict[int, int], point: float) -> None:
    assert choose(weights, point) in weights


@pytest.mark.parametrize(
    "weights", [{}, {1: 0}, {1: -1}, {1: MAX_WEIGHT + 1}, {1: True}, dict.fromkeys(range(1, MAX_SHARES + 2), 1)], ids=str
)
def test_weights_that_make_no_sense_are_refused(weights: dict[int, int]) -> None:
    with pytest.raises(InvalidRequest):
        check_weights(weights)


def test_a_share_of_zero_is_no_share() -> None:
    assert check_weights({2: 0, 1: 5}) == {1: 5}
