"""EngineSlots under any order of events, on a clock that jumps: the rules hold at each step, and everybody gets a turn."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters.errors import AdapterIncompatible, AdapterLoading, Overloaded, StoreUnreachable
from adapters.names import AdapterRef
from adapters.types import LocalAdapter
from serve_app.simulation.jumping_clock import JumpingLoop
from serve_app.slots.engine_slots import EngineSlots
from tests.slots_bench import Bench, StrictEngine, adapter

NAMES = [f"n{index}" for index in range(6)]
CAPACITY = 3
LONGEST_ANSWER_S = 8.0
SLICE_S = 1.0
EXPECTED = (AdapterIncompatible, StoreUnreachable, AdapterLoading)
names = st.sampled_from(NAMES)


class SlowEngine(StrictEngine):
    """Takes its time, and knows which of its adapters are held."""

    slots: EngineSlots
    whole: set[int]

    async def stage(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None:
        await super().stage(ref, int_id, files)
        await asyncio.sleep(0.2)

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int:
        await asyncio.sleep(0.1)
        landed = await super().add(ref, int_id, files)
        self.whole.add(int_id)
        return landed

    async def remove(self, ref: AdapterRef, int_id: int) -> None:
        assert int_id not in self.whole or ref not in self.slots.held(), "an adapter that is held was evicted"
        await asyncio.sleep(0.05)
        await super().remove(ref, int_id)


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = JumpingLoop()
        self.bench = Bench(CAPACITY, wait_s=600, slice_s=SLICE_S, clock_s=self.loop.time)
        engine = SlowEngine(CAPACITY)
        engine.slots, engine.whole = self.bench.slots, set()
        self.bench.engine = self.bench.slots._engine = engine
        self.tasks: list[asyncio.Task[object]] = []

    def start(self, work) -> None:
        self.tasks.append(self.loop.create_task(work))
        self.run(0)

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(self._pass(seconds))

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        for _ in range(10):  # what was begun reaches the engine before the next event comes
            await asyncio.sleep(0)

    @rule(name=names, answer_s=st.floats(0, LONGEST_ANSWER_S))
    def a_request_comes(self, name: str, answer_s: float) -> None:
        self.start(self.bench.request(adapter(name), answer_s))

    @rule(crowd=st.lists(names, min_size=5, max_size=12))
    def a_crowd_comes(self, crowd: list[str]) -> None:
        for index, name in enumerate(crowd):
            self.start(self.bench.request(adapter(name), LONGEST_ANSWER_S * index / len(crowd)))
        self.run(1.5)

    @rule(name=names)
    def a_request_comes_that_does_not_wait(self, name: str) -> None:
        self.start(self.bench.slots.use(adapter(name), wait=False))
        self.tasks[-1].add_done_callback(lambda task: task.exception() or task.result().release())

    @rule(name=names, urgent=st.booleans())
    def someone_warms(self, name: str, urgent: bool) -> None:
        self.start(self.bench.slots.warm(adapter(name), urgent=urgent))

    @rule(name=names)
    def someone_holds(self, name: str) -> None:
        try:
            self.bench.slots.hold(adapter(name).ref)
        except Overloaded as error:
            assert (error.reason, error.limit, error.value) == ("too_many_pins", CAPACITY - 1, CAPACITY)

    @rule(name=names)
    def a_hold_ends(self, name: str) -> None:
        self.bench.slots.unhold(adapter(name).ref)

    @rule(name=names)
    def someone_evicts(self, name: str) -> None:
        self.start(self.bench.slots.evict(adapter(name).ref))

    @rule(name=names, fails=st.booleans())
    def the_engine_likes_or_dislikes(self, name: str, fails: bool) -> None:
        (self.bench.engine.failing.add if fails else self.bench.engine.failing.discard)(adapter(name).ref)

    @rule()
    def the_store_fails_once(self) -> None:
        self.bench.cache.failures.append(StoreUnreachable("down"))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def someone_gives_up(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tasks)).cancel()
        self.run(0)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(seconds)

    @invariant()
    def what_the_table_shows_is_in_the_engine(self) -> None:
        engine = self.bench.engine
        assert self.bench.slots.int_ids() <= set(engine.loaded)
        assert len(engine.loaded) <= CAPACITY
        assert len(self.bench.slots.held()) <= CAPACITY - 1

    @invariant()
    def nobody_meets_an_error_of_others(self) -> None:
        for task in self.tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), EXPECTED), repr(task.exception())

    async def _all_tasks(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def teardown(self) -> None:
        began_s = self.loop.time()
        self.loop.run_until_complete(self._all_tasks())
        # One place stays free of holds; a turn there is a time slice, the patience of who waits, an answer and a load.
        assert self.loop.time() - began_s <= len(NAMES) * (SLICE_S + 2 * LONGEST_ANSWER_S + 4)
        self.run(10)
        self.bench.check_quiet()
        self.nobody_meets_an_error_of_others()
        assert set(self.bench.slots.resident().values()) <= {0}
        self.loop.close()


SlotsMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_order_of_events_keeps_the_rules = SlotsMachine.TestCase
