"""What a phase's loads ask for, and when."""

from __future__ import annotations

import base64
import io
import statistics
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from loadtests import workload
from loadtests.scenario import Burst, Change, Gamma, Load, Phase, Pool, Popularity, Spaced, Span

POOLS = {"small": Pool(count=4), "large": Pool(count=50)}
STEADY = Load(name="steady", pool="small", arrivals=Spaced(count=40, every_s=0.5))
POWER = Popularity(kind="power")

arrivals = st.one_of(
    st.builds(
        Gamma,
        rate_per_s=st.floats(0.5, 20),
        cv=st.floats(0.2, 4),
        duration_s=st.floats(0.5, 10),
    ),
    st.builds(Burst, count=st.integers(1, 40)),
    st.builds(Spaced, count=st.integers(1, 40), every_s=st.floats(0.01, 2)),
)
loads = st.builds(
    Load,
    name=st.sampled_from(["a", "b"]),
    arrivals=arrivals,
    pool=st.sampled_from([None, "small", "large"]),
    popularity=st.builds(
        Popularity,
        kind=st.sampled_from(["each", "power"]),
        alpha=st.floats(0, 2),
        churn_every_s=st.none() | st.floats(0.2, 5),
    ),
    starts_s=st.floats(0, 5),
    prompt_tokens=st.none() | st.just(Span(least=2, most=30)),
    output_tokens=st.just(Span(least=1, most=64)),
    images=st.integers(0, 1),
)
changes = st.lists(
    st.builds(
        Change,
        do=st.sampled_from(["publish", "republish"]),
        pool=st.sampled_from(["small", "large"]),
        at_s=st.floats(0, 5),
        every_s=st.none() | st.floats(0.1, 2),
        count=st.integers(1, 3),
    ),
    max_size=3,
).map(tuple)


def phase(*loads: Load, changes: tuple[Change, ...] = ()) -> Phase:
    return Phase(name="phase", loads=loads, changes=changes)


def plan(*loads: Load, seed: int = 1, changes: tuple[Change, ...] = ()) -> tuple[workload.Planned, ...]:
    return workload.plan(phase(*loads, changes=changes), POOLS, seed)


def asked(planned: tuple[workload.Planned, ...]) -> list[int | None]:
    return [request.adapter_index for request in planned]


def without_numbers(planned: tuple[workload.Planned, ...], load: str) -> list[tuple]:
    kept = [request for request in planned if request.load == load]
    return [(r.at_s, r.adapter_index, r.prompt, r.max_tokens, r.images) for r in kept]


@settings(deadline=None)
@given(loads, changes, st.integers())
def test_the_same_seed_gives_the_same_plan(load, changes, seed):
    assert plan(load, seed=seed, changes=changes) == plan(load, seed=seed, changes=changes)


@settings(deadline=None)
@given(loads, loads, changes)
def test_requests_are_numbered_in_the_order_of_their_times_and_none_leaves_before_its_load_starts(one, other, changes):
    planned = plan(one, other, changes=changes)
    assert [request.number for request in planned] == list(range(len(planned)))
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(planned))
    assert all(request.at_s >= min(one.starts_s, other.starts_s) for request in planned)


@settings(deadline=None)
@given(loads, changes, st.integers())
def test_a_load_beside_another_moves_none_of_its_requests(load, changes, seed):
    other = Load(name="beside", pool="large", arrivals=Gamma(rate_per_s=5, duration_s=3), popularity=POWER, images=1)
    alone, beside = plan(load, seed=seed, changes=changes), plan(other, load, seed=seed, changes=changes)
    assert without_numbers(beside, load.name) == without_numbers(alone, load.name)


@settings(deadline=None)
@given(loads, changes)
def test_longer_prompts_and_answers_move_no_arrival_and_no_choice(load, changes):
    longer = load.model_copy(update={"prompt_tokens": Span(least=100, most=200), "output_tokens": Span(least=5, most=500)})
    pairs = [[(r.at_s, r.adapter_index) for r in plan(one, changes=changes)] for one in (load, longer)]
    assert pairs[0] == pairs[1]


@settings(deadline=None)
@given(loads, changes)
def test_only_adapters_are_asked_for_that_are_there(load, changes):
    coming = {one.index: one.from_s for one in workload.newcomers(phase(load, changes=changes), POOLS, load.pool or "small")}
    for request in plan(load, changes=changes):
        if load.pool is None:
            assert request.adapter_index is None
        elif request.adapter_index >= POOLS[load.pool].count:
            assert coming[request.adapter_index] <= request.at_s


def test_another_seed_gives_another_plan():
    load = Load(name="a", pool="small", arrivals=Gamma(rate_per_s=5, duration_s=10))
    assert plan(load, seed=1) != plan(load, seed=2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_arrivals_have_their_rate_and_their_coefficient_of_variation(cv, seed):
    load = Load(name="a", arrivals=Gamma(rate_per_s=50, cv=cv, duration_s=600))
    gaps_s = [later.at_s - earlier.at_s for earlier, later in pairwise(plan(load, seed=seed))]
    assert 1 / statistics.mean(gaps_s) == pytest.approx(50, rel=0.06)
    assert statistics.stdev(gaps_s) / statistics.mean(gaps_s) == pytest.approx(cv, rel=0.06)


def test_gamma_arrivals_end_with_their_duration():
    planned = plan(Load(name="a", starts_s=3, arrivals=Gamma(rate_per_s=20, duration_s=10)))
    assert 12 < planned[-1].at_s < 13


def test_a_burst_leaves_at_once_and_spaced_requests_one_after_another():
    burst = Load(name="burst", starts_s=2, arrivals=Burst(count=3))
    spaced = Load(name="spaced", arrivals=Spaced(count=3, every_s=0.5))
    assert [(r.load, r.at_s) for r in plan(burst, spaced)] == [
        ("spaced", 0.0),
        ("spaced", 0.5),
        ("spaced", 1.0),
        ("burst", 2.0),
        ("burst", 2.0),
        ("burst", 2.0),
    ]


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.5])
def test_popularity_by_a_power_law_has_its_shares(alpha):
    popularity = Popularity(kind="power", alpha=alpha)
    load = Load(name="a", pool="large", arrivals=Burst(count=30_000), popularity=popularity)
    shares = sorted((count / 30_000 for count in Counter(asked(plan(load))).values()), reverse=True)
    total = sum(place**-alpha for place in range(1, 51))
    for place in (1, 2, 5, 10):
        assert shares[place - 1] == pytest.approx(place**-alpha / total, rel=0.15)


def test_each_adapter_is_asked_for_in_turn():
    assert asked(plan(STEADY))[:9] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_churn_makes_another_adapter_the_most_popular():
    popularity = Popularity(kind="power", alpha=3, churn_every_s=10)
    load = Load(name="a", pool="large", arrivals=Spaced(count=6000, every_s=0.01), popularity=popularity)
    chosen = asked(plan(load))
    favourites = [Counter(chosen[start : start + 1000]).most_common(1)[0][0] for start in range(0, 6000, 1000)]
    assert len(set(favourites)) >= 4


def test_the_first_request_after_a_publication_asks_for_the_newcomer_which_then_has_its_turn():
    publish = Change(do="publish", pool="small", at_s=1.0, every_s=2.0, count=2, asked_after_s=0.5)
    chosen = asked(plan(STEADY, changes=(publish,)))
    # 1.5 s and 3.5 s after the beginning, one request every half second.
    assert chosen[:10] == [0, 1, 2, 4, 3, 0, 1, 5, 2, 4]


def test_a_newcomer_is_the_most_popular_of_a_power_law():
    publish = Change(do="publish", pool="small", at_s=0, asked_after_s=1)
    load = STEADY.model_copy(update={"popularity": Popularity(kind="power", alpha=3)})
    assert Counter(asked(plan(load, changes=(publish,)))).most_common(1)[0][0] == 4


def test_newcomers_are_numbered_by_the_time_of_their_publication():
    late = Change(do="publish", pool="small", at_s=5)
    early = Change(do="publish", pool="small", at_s=1, asked_after_s=0)
    coming = workload.newcomers(phase(STEADY, changes=(late, early)), POOLS, "small")
    assert [(one.index, one.from_s) for one in coming] == [(4, 1.0), (5, 7.0)]


def test_other_changes_change_no_plan():
    others = tuple(Change(do=do, pool="small", at_s=1) for do in ("republish", "promote", "evict"))
    assert plan(STEADY, changes=others) == plan(STEADY)


def test_a_load_without_a_length_says_hello_and_lets_the_answer_end():
    request = plan(STEADY)[0]
    assert (request.prompt, request.whole_length) == ("Hello", False)


def test_prompts_have_as_many_words_as_tokens_are_wanted_and_none_comes_twice():
    load = STEADY.model_copy(update={"prompt_tokens": Span(least=20, most=30), "output_tokens": Span(least=5, most=9)})
    planned = plan(load)
    lengths = {len(request.prompt.split()) for request in planned}
    assert min(lengths) >= 20
    assert max(lengths) <= 30
    assert len({request.prompt for request in planned}) == len(planned)
    assert {request.max_tokens for request in planned} == {5, 6, 7, 8, 9}
    assert planned[0].whole_length


def test_images_are_small_pictures_each_its_own():
    planned = plan(STEADY.model_copy(update={"images": 2}))
    urls = [url for request in planned for url in request.images]
    assert len(set(urls)) == 80
    picture = Image.open(io.BytesIO(base64.b64decode(urls[0].removeprefix("data:image/png;base64,"))))
    assert (picture.format, picture.size) == ("PNG", (workload.IMAGE_PX, workload.IMAGE_PX))
