"""When a call is tried again, after how long, and how often a process may: clock, dice and sleep are the test's."""

from __future__ import annotations

import asyncio

import pytest

from adapters import errors, metrics
from adapters.store import retrying
from adapters.store.retrying import Caller, RetryBudget, RetryPolicy, pause_before_retry_s
from tests.recorded_meter import RecordedMeter

DOWN = errors.StoreUnreachable("down")
POLICY = RetryPolicy(limit_s=5, first_pause_s=0.05, most_pause_s=1.0, most_retries=10)


class Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        self.slept_s.append(pause_s)
        self.now_s += pause_s


class Work:
    """Fails with each of `failures` in turn, then answers; each attempt takes `takes_s` of the clock."""

    def __init__(self, clock: Clock, *failures: Exception, takes_s: float = 0.0) -> None:
        self.clock, self.failures, self.takes_s = clock, list(failures), takes_s
        self.attempts = 0

    async def __call__(self) -> str:
        self.attempts += 1
        self.clock.now_s += self.takes_s
        if self.failures:
            raise self.failures.pop(0)
        return "answer"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter() -> RecordedMeter:
    return RecordedMeter()


def caller(clock: Clock, meter: RecordedMeter | None = None, budget: RetryBudget | None = None, dice: float = 0.999) -> Caller:
    return Caller(
        meter or RecordedMeter(), POLICY, budget or RetryBudget(clock), clock_s=clock, dice=lambda: dice, sleep=clock.sleep
    )


class TestThePause:
    def test_has_a_bound_that_doubles_up_to_the_most(self) -> None:
        bounds = [pause_before_retry_s(POLICY, retries=retries, elapsed_s=0, dice=1.0) for retries in range(8)]
        assert bounds == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]

    @pytest.mark.parametrize("dice", [0.0, 0.25, 0.999])
    def test_is_anything_below_its_bound(self, dice: float) -> None:
        assert pause_before_retry_s(POLICY, retries=2, elapsed_s=0, dice=dice) == pytest.approx(0.2 * dice)

    def test_must_end_before_the_calls_limit(self) -> None:
        assert pause_before_retry_s(POLICY, retries=6, elapsed_s=3.9, dice=1.0) == 1.0
        assert pause_before_retry_s(POLICY, retries=6, elapsed_s=4.0, dice=1.0) is None

    def test_there_is_none_after_the_most_retries(self) -> None:
        assert pause_before_retry_s(POLICY, retries=10, elapsed_s=0, dice=0) is None

    def test_there_is_none_where_retries_are_off(self) -> None:
        assert pause_before_retry_s(RetryPolicy(0), retries=0, elapsed_s=0, dice=0) is None


class TestTheBudget:
    def test_holds_a_small_reserve(self, clock: Clock) -> None:
        budget = RetryBudget(clock)
        assert [budget.take_retry() for _ in range(21)] == [True] * 20 + [False]

    def test_lets_one_in_five_calls_retry(self, clock: Clock) -> None:
        budget = RetryBudget(clock)
        while budget.take_retry():
            pass
        taken = 0
        for _ in range(1000):
            budget.count_call()
            taken += budget.take_retry()
        assert taken == pytest.approx(200, abs=1)

    def test_comes_back_with_time_and_never_beyond_the_reserve(self, clock: Clock) -> None:
        budget = RetryBudget(clock)
        while budget.take_retry():
            pass
        clock.now_s += 3
        assert [budget.take_retry() for _ in range(4)] == [True, True, True, False]
        clock.now_s += 10_000
        assert sum(budget.take_retry() for _ in range(100)) == 20

    def test_is_one_for_each_store_of_a_process(self) -> None:
        assert retrying.budget_of("one") is retrying.budget_of("one")
        assert retrying.budget_of("one") is not retrying.budget_of("two")


class TestWhatMayBeRepeated:
    @pytest.mark.parametrize(
        ("rule", "repeated"),
        [
            (retrying.never, set()),
            (retrying.if_nothing_written, {"StoreNoConnection", "StoreThrottled"}),
            (
                retrying.if_passing,
                {"StoreNoConnection", "StoreThrottled", "StoreUnreachable", "StoreTimedOut", "StoreCutOff"},
            ),
            (
                retrying.if_passing_or_busy,
                {"StoreNoConnection", "StoreThrottled", "StoreUnreachable", "StoreTimedOut", "StoreCutOff", "StoreConflict"},
            ),
        ],
    )
    def test_by_class_of_error(self, rule: retrying.MayRepeat, repeated: set[str]) -> None:
        classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.StoreError)]
        assert {cls.__name__ for cls in classes if rule(cls("trouble"))} == repeated


class TestACall:
    async def test_is_tried_until_it_answers(self, clock: Clock) -> None:
        work = Work(clock, DOWN, DOWN)
        assert await caller(clock).run("get", work, retrying.if_passing) == "answer"
        assert work.attempts == 3
        assert clock.slept_s == pytest.approx([0.05, 0.1], rel=0.01)

    async def test_raises_the_last_error_at_its_limit(self, clock: Clock) -> None:
        work = Work(clock, DOWN, DOWN, errors.StoreThrottled("slow"), takes_s=2.4)
        with pytest.raises(errors.StoreThrottled):
            await caller(clock).run("get", work, retrying.if_passing)
        assert work.attempts == 3

    async def test_is_not_tried_again_where_that_does_not_help(self, clock: Clock) -> None:
        work = Work(clock, errors.StoreDenied("no"))
        with pytest.raises(errors.StoreDenied):
            await caller(clock).run("get", work, retrying.if_passing)
        assert (work.attempts, clock.slept_s) == (1, [])

    async def test_is_not_tried_again_when_the_budget_is_spent(self, clock: Clock, meter: RecordedMeter) -> None:
        budget = RetryBudget(clock)
        while budget.take_retry():
            pass
        with pytest.raises(errors.StoreUnreachable):
            await caller(clock, meter, budget).run("get", Work(clock, DOWN), retrying.if_passing)
        assert meter.counted(metrics.STORE_RETRIES_REFUSED, method="get", reason="unreachable") == 1
        assert meter.counted(metrics.STORE_RETRIES) == 0

    async def test_is_measured_once_with_its_retries_inside(self, clock: Clock, meter: RecordedMeter) -> None:
        await caller(clock, meter).run("get", Work(clock, DOWN, DOWN, takes_s=0.5), retrying.if_passing)
        assert meter.counted(metrics.STORE_CALLS, method="get", result="ok") == meter.counted(metrics.STORE_CALLS) == 1
        assert meter.counted(metrics.STORE_RETRIES, method="get", reason="unreachable") == 2
        [seconds] = meter.observed(metrics.STORE_CALL_SECONDS, method="get")
        assert seconds == pytest.approx(1.65, abs=0.01)

    async def test_that_fails_is_counted_under_its_reason(self, clock: Clock, meter: RecordedMeter) -> None:
        with pytest.raises(errors.StoreCredentialsExpired):
            await caller(clock, meter).run("list", Work(clock, errors.StoreCredentialsExpired("old")), retrying.if_passing)
        assert meter.counted(metrics.STORE_CALLS, method="list", result="credentials_expired") == 1

    async def test_that_is_cancelled_ends_at_once_and_is_counted(self, clock: Clock, meter: RecordedMeter) -> None:
        work = asyncio.create_task(caller(clock, meter).run("get", lambda: asyncio.sleep(60), retrying.if_passing))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert meter.counted(metrics.STORE_CALLS, method="get", result="given_up") == 1
