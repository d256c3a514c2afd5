"""The one layer that tries again: when it helps, after how long, and how often this process may.

Deciding is pure (`pause_before_retry_s`, `RetryBudget`); `Caller` acts on it and measures. Retries never multiply an outage: a
process spends about one retry for five calls, beside a small reserve that comes back with time.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from adapters import metrics
from adapters.errors import StoreConflict, StoreError, StoreNoConnection, StoreThrottled, StoreUnreachable
from adapters.metrics import NULL_METER, Meter

T = TypeVar("T")
MayRepeat = Callable[[StoreError], bool]

RETRIES_PER_CALL = 0.2
RESERVE = 20.0
RESERVE_PER_S = 1.0


def never(error: StoreError) -> bool:
    """For calls that can't be given twice."""
    return False


def if_passing(error: StoreError) -> bool:
    """For reads and for writes that may happen twice: trouble that may be over soon."""
    return isinstance(error, (StoreUnreachable, StoreThrottled))


def if_passing_or_busy(error: StoreError) -> bool:
    """For unconditional writes: a "conflict" there is another write under way, not a lost condition."""
    return if_passing(error) or isinstance(error, StoreConflict)


def if_nothing_written(error: StoreError) -> bool:
    """For conditional writes: only what proves that nothing was written. A lost answer is for the caller, who can read."""
    return isinstance(error, (StoreNoConnection, StoreThrottled))


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`limit_s` is how long after its begin a call may still be tried again; 0 means once only."""

    limit_s: float
    first_pause_s: float = 0.05
    most_pause_s: float = 1.0
    most_retries: int = 10


def pause_before_retry_s(policy: RetryPolicy, *, retries: int, elapsed_s: float, dice: float) -> float | None:
    """How long to wait before the next try, or None to give up. `retries` were made already; `dice` is uniform in [0, 1).

    Full jitter: anything up to a bound that doubles, so that callers who failed together don't come back together.
    """
    if policy.limit_s <= 0 or retries >= policy.most_retries:
        return None
    pause_s = dice * min(policy.most_pause_s, policy.first_pause_s * 2**retries)
    return pause_s if elapsed_s + pause_s < policy.limit_s else None


class RetryBudget:
    """A token bucket: each call puts in a fifth of a token, each second one, each retry takes one; it holds `RESERVE`.

    Shared by all calls of a process to one store, from any thread.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._tokens = RESERVE
        self._counted_s = clock_s()
        self._lock = threading.Lock()

    def count_call(self) -> None:
        with self._lock:
            self._tokens = min(RESERVE, self._tokens + RETRIES_PER_CALL)

    def take_retry(self) -> bool:
        """Whether a retry may be made; then it counts as made."""
        with self._lock:
            now_s = self._clock_s()
            self._tokens = min(RESERVE, self._tokens + (now_s - self._counted_s) * RESERVE_PER_S)
            self._counted_s = now_s
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


@functools.cache
def budget_of(address: str) -> RetryBudget:
    """The process' budget for one store; trouble with one is none with another."""
    return RetryBudget()


class Caller:
    """Runs the calls of one store: measures each, and tries it again where that may help."""

    def __init__(
        self,
        meter: Meter = NULL_METER,
        policy: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._meter = meter
        self._policy = policy or RetryPolicy(0)
        self._budget = budget or RetryBudget(clock_s)
        self._clock_s = clock_s
        self._dice = dice
        self._sleep = sleep

    async def run(self, method: str, attempt: Callable[[], Awaitable[T]], may_repeat: MayRepeat = never) -> T:
        """The result of `attempt`, tried again after errors that `may_repeat` allows. Raises its last error."""
        began_s = self._clock_s()
        result = "ok"
        self._budget.count_call()
        try:
            return await self._attempts(method, attempt, may_repeat, began_s)
        except StoreError as error:
            result = error.reason or error.code
            raise
        except BaseException:
            result = "given_up"  # cancelled, or an error of the caller's own
            raise
        finally:
            self._meter.count(metrics.STORE_CALLS, method=method, result=result)
            self._meter.observe(metrics.STORE_CALL_SECONDS, self._clock_s() - began_s, method=method)

    async def _attempts(self, method: str, attempt: Callable[[], Awaitable[T]], may_repeat: MayRepeat, began_s: float) -> T:
        retries = 0
        while True:
            try:
                return await attempt()
            except StoreError as error:
                pause_s = self._pause_s(method, error, retries, began_s) if may_repeat(error) else None
                if pause_s is None:
                    raise
            await self._sleep(pause_s)
            retries += 1

    def _pause_s(self, method: str, error: StoreError, retries: int, began_s: float) -> float | None:
        elapsed_s = self._clock_s() - began_s
        pause_s = pause_before_retry_s(self._policy, retries=retries, elapsed_s=elapsed_s, dice=self._dice())
        if pause_s is None:
            return None
        may = self._budget.take_retry()
        counter = metrics.STORE_RETRIES if may else metrics.STORE_RETRIES_REFUSED
        self._meter.count(counter, method=method, reason=error.reason or error.code)
        return pause_s if may else None
