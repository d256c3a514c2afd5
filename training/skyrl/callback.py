"""Publishing from within SkyRL's trainer. Needs `skyrl`; runs in SkyRL's own environment, in the task that trains.

SkyRL fires `on_save` before the step's export is written and says nothing after it; `on_log` comes last, when the export and the
step's evaluation are there. An exception in a callback would end the training, and what a callback waits for, the trainer waits
for: so nothing is raised here, and what takes time is the publisher's own thread's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl

from adapters.contract.safetensors_file import read_header
from adapters.errors import AdapterRefused
from training.runs.events import AdapterSaved

log = logging.getLogger("loramux.skyrl")

OF_EVALUATION = "eval/all/environment/"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class PublisherLike(Protocol):
    """What is used of `training.publishing.Publisher`."""

    def offer(self, saved: AdapterSaved) -> None: ...

    def scan(self, export_path: Path | str) -> None: ...

    def close(self, timeout_s: float) -> Any: ...


def quietly(method: Callable[..., None]) -> Callable[..., None]:
    """Whatever goes wrong is logged, and the training goes on."""

    @wraps(method)
    def tried(*arguments: Any, **named: Any) -> None:
        try:
            method(*arguments, **named)
        except Exception:
            log.exception("publishing: %s failed; the training goes on", method.__name__)

    return tried


class PublishCallback(TrainingCallback):
    """Offers each export to the publisher, with the metrics of its step. `decoding` is how evaluations are played. What a run
    before this one left unpublished is found by a scan at the start; what is not whole yet is looked at at the next step."""

    def __init__(
        self, publisher: PublisherLike, export_path: Path, *, spec_digest: str, decoding: str, close_timeout_s: float
    ) -> None:
        self.publisher = publisher
        self.export_path = export_path
        self.spec_digest = spec_digest
        self.decoding = decoding
        self.close_timeout_s = close_timeout_s
        self._logged: dict[int, dict[str, float]] = {}
        self._closed = False

    @quietly
    def on_train_start(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        self.publisher.scan(self.export_path)

    @quietly
    def on_log(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        logs = callback_input.logs or {}
        rates = solve_rates(logs, self.decoding)
        self._logged[callback_input.global_step] = {**numbers(logs), **rates}
        self._offer_whole(callback_input.global_step)
        if callback_input.logs is not None:
            callback_input.logs.update(rates)

    @quietly
    def on_train_end(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        self._offer_whole(callback_input.global_step)
        self.close()

    @quietly
    def close(self) -> None:
        """Gives the publisher `close_timeout_s` to finish; for the end of a training that failed, too."""
        if not self._closed:
            self._closed = True
            self.publisher.close(self.close_timeout_s)

    def _offer_whole(self, now: int) -> None:
        """The exports of steps that were logged here and are whole, each once. The last one may come after its step's log."""
        for step in sorted(self._logged):
            self._offer(step)
            if step < now and not self._folder(step).exists():
                self._logged.pop(step, None)

    @quietly
    def _offer(self, step: int) -> None:
        if is_whole(folder := self._folder(step)):
            self.publisher.offer(AdapterSaved(step, str(folder), self._logged[step], self.spec_digest))
            del self._logged[step]

    def _folder(self, step: int) -> Path:
        return self.export_path / f"global_step_{step}" / "policy"


def solve_rates(logs: Mapping[str, Any], decoding: str) -> dict[str, float]:
    """`eval/<set>/<decoding>/solve_rate`, with `solved` and `mazes` beside it, of what the environment counted."""
    rates: dict[str, float] = {}
    for key, mazes in logs.items():
        if key.startswith(OF_EVALUATION) and key.endswith("/mazes") and mazes:
            name = key.removeprefix(OF_EVALUATION).removesuffix("/mazes")
            solved = float(logs[f"{OF_EVALUATION}{name}/solved"])
            told = {"solve_rate": solved / mazes, "solved": solved, "mazes": float(mazes)}
            rates |= {f"eval/{name}/{decoding}/{part}": value for part, value in told.items()}
    return rates


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in logs.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def is_whole(folder: Path) -> bool:
    """Whether both files of an adapter parse, to the last byte: SkyRL 0.3.0 writes exports in place, later ones rename them."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        tensors = read_header(folder / WEIGHTS)
    except (OSError, ValueError, AdapterRefused):
        return False
    return isinstance(config, dict) and bool(tensors)
