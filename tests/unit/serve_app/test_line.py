"""The line: urgent first, nobody overtakes an equal, nobody is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.slots.line import Line


class Person:
    def __init__(self, name: str, urgent: bool = True) -> None:
        self.name = name
        self.urgent = urgent


class Desk:
    """Seats that a line waits for."""

    def __init__(self, seats: int = 0) -> None:
        self.seats = seats
        self.seated: list[str] = []
        self.line: Line[Person] = Line(self._try_take)
        self.tasks: list[asyncio.Task[None]] = []

    async def _try_take(self, who: Person) -> bool:
        if not self.seats:
            return False
        self.seats -= 1
        self.seated.append(who.name)
        await asyncio.sleep(0)
        return True

    async def come(self, *people: Person) -> None:
        for person in people:
            self.tasks.append(asyncio.create_task(self.line.take(person)))
        await settle()

    async def free(self, seats: int) -> None:
        self.seats += seats
        self.line.wake()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_comes_first_gets_it_first():
    desk = Desk()
    await desk.come(Person("a"), Person("b"), Person("c"))
    await desk.free(3)
    assert desk.seated == ["a", "b", "c"]


async def test_the_urgent_go_before_those_who_came_earlier():
    desk = Desk()
    await desk.come(Person("patient", urgent=False), Person("a"), Person("b"))
    await desk.free(3)
    assert desk.seated == ["a", "b", "patient"]


async def test_a_newcomer_does_not_overtake_an_equal_when_a_seat_is_free_already():
    desk = Desk()
    await desk.come(Person("a"))
    desk.seats = 1  # nobody has been woken yet
    await desk.come(Person("b"))
    desk.line.wake()
    await settle()
    assert desk.seated == ["a"]


async def test_who_becomes_urgent_while_waiting_moves_forward():
    desk = Desk()
    late = Person("late", urgent=False)
    await desk.come(Person("patient", urgent=False), late)
    late.urgent = True
    await desk.free(1)
    assert desk.seated == ["late"]


async def test_one_who_gives_up_holds_up_nobody():
    desk = Desk()
    await desk.come(Person("a"), Person("b"))
    desk.seats = 1
    desk.line.wake()
    desk.tasks[0].cancel()
    await settle()
    assert desk.seated == ["b"]
    with pytest.raises(asyncio.CancelledError):
        await desk.tasks[0]
