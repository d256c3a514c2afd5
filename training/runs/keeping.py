"""What of a run is kept as it goes: checkpoints to go on from, exports to serve. What fails stays owed and is tried again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.runs import events, measures
from training.runs.checkpoints import Checkpoint, Checkpoints, size_bytes
from training.runs.events import AdapterSaved, CheckpointSaved
from training.runs.plan import Plan
from training.runs.protocols import Learner
from training.runs.ranks import together
from training.runs.resuming import check_may_resume
from training.runs.surroundings import Surroundings
from training.runs.telling import Telling


class Keeping:
    """Of one run; all ranks call the same in the same order."""

    def __init__(self, plan: Plan, learner: Learner, telling: Telling, around: Surroundings):
        self._plan = plan
        self._learner = learner
        self._telling = telling
        self._around = around
        self._checkpoints = Checkpoints(plan.ckpt_path, plan.max_ckpts_to_keep, around.ranks)
        self._checkpoint_step = 0
        self._checkpoint_owed = self._export_owed = False

    @property
    def checkpoint_owed(self) -> bool:
        return self._checkpoint_owed

    @property
    def owed(self) -> bool:
        return self._checkpoint_owed or self._export_owed

    def resume(self) -> Checkpoint | None:
        """The learner is where the checkpoint was. Raises NoCheckpoint and OtherSpec."""
        ranks = self._around.ranks
        found: Checkpoint | None = ranks.shared(self._found() if ranks.rank == 0 else None)
        if found:
            self._learner.load_state(found.policy)
            if ranks.rank == 0:
                self._checkpoints.tidy(found.step)
            self._checkpoint_step = found.step
        return found

    def keep(self, step: int) -> None:
        """What is due after a step, and what is owed. To be called when the step is evaluated: a checkpoint then holds all that
        is known of it, and an export is told with the adapter's own metrics."""
        self._checkpoint_owed |= self._plan.checkpoint_due(step) and step != self._checkpoint_step
        self._export_owed |= self._plan.export_due(step) and not self._is_exported(step)
        if self._checkpoint_owed:
            self.checkpoint(step)
        if self._export_owed:
            self._export_owed = not self._telling.attempt(step, "export", lambda: self._export(step))

    def checkpoint(self, step: int) -> None:
        if step != self._checkpoint_step:
            self._checkpoint_owed = not self._telling.attempt(step, "checkpoint", lambda: self._save_checkpoint(step))

    def write_adapter(self, folder: Path) -> None:
        """All ranks together; over what an earlier life of the run left there."""
        together(self._around.ranks, lambda: _make_way(folder), only_first=True)
        together(self._around.ranks, lambda: self._learner.save_adapter(folder))

    def _found(self) -> Checkpoint | None:
        found = self._checkpoints.find(self._plan.resume_mode, self._plan.resume_path)
        if found:
            now = self._specification()
            check_may_resume(_specification(found.state), now, str(found.folder))
        return found

    def _specification(self) -> dict[str, Any]:
        return _specification({"spec": self._plan.spec, "world_size": self._around.ranks.world_size})

    def _save_checkpoint(self, step: int) -> None:
        seconds: dict[str, float] = {}
        with self._around.timed(seconds, "checkpoint"):
            folder = self._checkpoints.save(step, self._learner.save_state, self._state(step))
        self._checkpoint_step = step
        self._telling.tell(CheckpointSaved(step, str(folder), size_bytes(folder), seconds["checkpoint"]))

    def _state(self, step: int) -> dict[str, Any]:
        order = self._plan.order
        return {
            "world_size": self._around.ranks.world_size,
            "position": {"epoch": order.epoch_of(step), "step": step, "steps_per_epoch": order.steps_per_epoch},
            "spec_digest": self._plan.spec_digest,
            "spec": dict(self._plan.spec),
            "history": [events.as_row(line) for line in events.history(self._telling.lines)],
        }

    def _export(self, step: int) -> None:
        self._around.phase("export")
        folder = self._plan.export_folder(step)
        self.write_adapter(folder)
        saved = AdapterSaved(step, str(folder), measures.metrics_at(self._telling.lines, step), self._plan.spec_digest)
        self._telling.tell(saved)
        if self._around.publisher:
            self._around.publisher.offer(saved)

    def _is_exported(self, step: int) -> bool:
        """Told of and there; one that a killed run left untold is made again."""
        told = any(isinstance(line.event, AdapterSaved) and line.event.step == step for line in self._telling.lines)
        return told and self._around.ranks.shared(self._plan.export_folder(step).is_dir())


def _specification(state: Mapping[str, Any]) -> dict[str, Any]:
    """The number of processes beside it: each has its own files in a checkpoint."""
    return {**state["spec"], "processes of the learner": state["world_size"]}


def _make_way(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
