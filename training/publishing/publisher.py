"""The publisher: takes exports from a run and makes versions of them beside it, in a thread and event loop of its own.

Nothing that happens to the store reaches the run: what can't be published now waits, its files stay, and it is tried again for as
long as the run lives. What is left then is found by the next scan.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from adapters.errors import AdapterRefused, InvalidRequest, LoraMuxError, StoreError
from adapters.registry import Registry
from training.publishing.exports import Export, Exports, export_digest, record, recorded
from training.publishing.origin import Origin, Target
from training.publishing.told import Judged, Published, PublishRefused, PublishTrouble, Unpublished
from training.publishing.versions import Versions

log = logging.getLogger("loramux.publisher")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LOOK_AGAIN_S = 1.0
SETTLE_S = 10.0


class Saved(Protocol):
    """What a run says when an adapter lies complete in `folder`: `training.runs.events.AdapterSaved`."""

    @property
    def step(self) -> int: ...

    @property
    def folder(self) -> str: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def spec_digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long all wait after a failed pass: a random part of what doubles from `first_s` to `longest_s`, half of it at least."""

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S

    def after(self, failures: int) -> float:
        return min(self.longest_s, self.first_s * 2 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)


@dataclass(slots=True)
class _Waiting:
    """An export that is not done. Times are the process' monotonic clock, in seconds."""

    export: Export
    since_s: float
    failures: int = 0
    reason: str = "not tried yet"


class Publisher:
    """`open_registry` is called for every pass, so that credentials that were renewed are found. `tell` gets the values of
    `training.publishing.told`, from the publisher's thread. No method raises; all may be called from any thread."""

    def __init__(
        self,
        open_registry: Callable[[], Registry],
        target: Target,
        origin: Origin,
        tell: Callable[[Any], None] = lambda event: None,
        *,
        pauses: Pauses = Pauses(),
    ) -> None:
        self.target = target
        self.origin = origin
        self._open_registry = open_registry
        self._tell_run = tell
        self._pauses = pauses
        self._versions = Versions(target, origin)
        self._waiting: dict[Path, _Waiting] = {}
        self._done: dict[Path, str] = {}
        self._counts = {"published": 0, "promoted": 0, "refused": 0, "failed_attempts": 0}
        self._looks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._failed_passes = 0
        self._due_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="loramux-publisher", daemon=True)
        self._thread.start()

    # For the run

    def offer(self, saved: Saved) -> None:
        """Takes an adapter that was saved; returns at once."""
        folder = Path(saved.folder).absolute()
        export = Export(saved.step, folder, dict(saved.metrics), self.origin.run, saved.spec_digest)
        self._soon(lambda: self._admit(export))

    def scan(self, export_path: Path | str) -> None:
        """Takes every complete export below the path that no version holds yet; returns at once. For the start of a run that was
        killed before."""
        self._soon(lambda: self._scan(Path(export_path)))

    def watch(self, export_path: Path | str, *, interval_s: float = SETTLE_S, settle_s: float = SETTLE_S) -> None:
        """Scans again and again, for a run that somebody else started; what changed within `settle_s` waits."""
        self._soon(lambda: self._watch(Path(export_path), interval_s, settle_s), ends=False)

    def metrics(self) -> dict[str, float]:
        """`publish/pending`, `publish/oldest_pending_s`, and counts since the start: `publish/published`, `promoted`, `refused`,
        `failed_attempts`."""
        waiting = list(self._waiting.values())
        oldest_s = max((time.monotonic() - one.since_s for one in waiting), default=0.0)
        counts = {f"publish/{name}": float(count) for name, count in self._counts.items()}
        return {"publish/pending": float(len(waiting)), "publish/oldest_pending_s": oldest_s, **counts}

    def close(self, timeout_s: float) -> tuple[Unpublished, ...]:
        """Gives what is waiting `timeout_s` more, trying at once and often, and ends the thread. Tells what is left."""
        if self._closing:
            return ()
        self._closing = True
        if self._thread.is_alive():
            self._in_loop(self._drain(), timeout_s)
        left = tuple(
            Unpublished(one.export.step, str(one.export.folder), one.reason)
            for one in sorted(self._waiting.values(), key=lambda one: one.export.step)
        )
        for one in left:
            self._tell(one)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        return left

    # In the thread; everything below runs there

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        worker = self._loop.create_task(self._work())
        self._loop.run_forever()
        tasks = [worker, *self._looks]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _soon(self, work: Callable[[], Any], *, ends: bool = True) -> None:
        """Runs a coroutine in the thread; `close` waits for one that ends by itself."""

        def start() -> None:
            task = self._loop.create_task(_guarded(work()))
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)
            task.set_name("look" if ends else "watch")

        if self._closing:
            log.warning("the publisher is closed; what is offered now waits for the next scan")
            return
        self._loop.call_soon_threadsafe(start)

    def _in_loop(self, work: Any, timeout_s: float) -> None:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            done.result(timeout_s)
        except TimeoutError:
            done.cancel()

    async def _drain(self) -> None:
        """Returns when nothing waits any more."""
        while looks := [task for task in self._looks if task.get_name() == "look"]:
            await asyncio.gather(*looks)
        self._due_s = 0.0
        while self._waiting:
            self._idle.clear()
            self._wake.set()
            await self._idle.wait()

    async def _admit(self, export: Export) -> None:
        """Writes down what is known of it, then lets it wait for its turn."""
        try:
            digest = await asyncio.to_thread(export_digest, export.folder)
            await asyncio.to_thread(record, export, digest)
        except OSError as error:  # a full disk, or gone: the attempt will see
            log.warning("what is known of step %d could not be written beside it: %s", export.step, error)
        self._wait_for(export)

    async def _scan(self, export_path: Path) -> None:
        exports = Exports(export_path)
        await exports.look()
        await asyncio.sleep(LOOK_AGAIN_S)
        await self._look(exports)

    async def _watch(self, export_path: Path, interval_s: float, settle_s: float) -> None:
        exports = Exports(export_path, settle_s=settle_s)
        while True:
            try:
                await self._look(exports)
            except LoraMuxError as error:
                log.warning("the exports could not be looked at: %s", error)
            await asyncio.sleep(interval_s)

    async def _look(self, exports: Exports) -> None:
        ready, waiting = await exports.look()
        for one in waiting:
            log.info("not published yet: %s", one)
        for export in ready:
            try:
                digest = await asyncio.to_thread(export_digest, export.folder)
            except OSError:  # it went while it was looked at
                continue
            if export.folder not in self._waiting and self._done.get(export.folder) != digest:
                self._done[export.folder] = digest
                self._wait_for(recorded(export, digest))

    def _wait_for(self, export: Export) -> None:
        self._waiting[export.folder] = _Waiting(export, time.monotonic())
        self._wake.set()

    async def _work(self) -> None:
        while True:
            await self._until_due()
            is_done = await self._pass()
            self._failed_passes = 0 if is_done else self._failed_passes + 1
            pause_s = 0.0 if is_done else self._pauses.after(1 if self._closing else self._failed_passes)
            self._due_s = time.monotonic() + pause_s
            if not self._waiting:
                self._idle.set()

    async def _until_due(self) -> None:
        """Returns when something waits and the pause is over."""
        while True:
            left_s = self._due_s - time.monotonic()
            if self._waiting and left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left_s if self._waiting else None)
            self._wake.clear()

    async def _pass(self) -> bool:
        """Tries what waits, by step, so that versions come in the order of their steps also after an outage. Trouble with the
        store ends the pass, since it is everybody's. False if anything failed."""
        is_done = True
        for one in sorted(self._waiting.values(), key=lambda one: one.export.step):
            try:
                await self._versions.take(self._open_registry(), one.export, self._tell)
            except (AdapterRefused, InvalidRequest) as error:
                self._refuse(one, error.reason or error.code, str(error))
            except FileNotFoundError as error:
                self._refuse(one, "gone", f"the export is not there any more: {error.filename}")
            except StoreError as error:
                self._postpone(one, error.reason or error.code, error)
                return False
            except (LoraMuxError, OSError) as error:
                is_done = self._postpone(one, getattr(error, "reason", None) or type(error).__name__, error)
            except Exception as error:
                log.exception("publishing step %d failed", one.export.step)
                is_done = self._postpone(one, type(error).__name__, error)
            else:
                self._end(one)
        return is_done

    def _refuse(self, one: _Waiting, reason: str, message: str) -> None:
        self._counts["refused"] += 1
        self._end(one)
        self._tell(PublishRefused(one.export.step, reason, message))

    def _end(self, one: _Waiting) -> None:
        if self._waiting.get(one.export.folder) is one:  # else it was offered again meanwhile
            del self._waiting[one.export.folder]

    def _postpone(self, one: _Waiting, reason: str, error: Exception) -> Literal[False]:
        one.failures += 1
        self._counts["failed_attempts"] += 1
        if reason != one.reason or one.failures & (one.failures - 1) == 0:
            one.reason = reason
            self._tell(PublishTrouble(one.export.step, reason, str(error), one.failures))
        return False

    def _tell(self, event: Any) -> None:
        if isinstance(event, Published):
            self._counts["published"] += event.created
        if isinstance(event, Judged):
            self._counts["promoted"] += event.promoted
        try:
            self._tell_run(event)
        except Exception:
            log.exception("the run could not be told: %s", event)


async def _guarded(work: Any) -> None:
    try:
        await work
    except LoraMuxError as error:
        log.warning("the exports could not be looked at: %s", error)
    except Exception:
        log.exception("the publisher could not take an export")
