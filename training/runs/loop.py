"""The run: play, learn, hand the adapter over, evaluate, keep. What fails at writing is said and tried again; it ends no run."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from training.maze import EvaluationSet
from training.runs import measures
from training.runs.checkpoints import Checkpoint, write_whole
from training.runs.events import EventLog, RunEnded, RunStarted
from training.runs.keeping import Keeping
from training.runs.plan import Decoding, Plan, evaluation_tasks, training_tasks
from training.runs.protocols import Learner, Sampler
from training.runs.surroundings import Surroundings
from training.runs.telling import Telling
from training.trajectory import Sampling, Trajectory

RETRY_S = 10.0
LAST_TRIES = 60  # at the end no later step tries again


class Loop:
    """One run of one seed. With several ranks each has a Loop of the same plan, of which only rank 0's has sampler and log."""

    def __init__(
        self, plan: Plan, sampler: Sampler | None, learner: Learner, log: EventLog | None, around: Surroundings | None = None
    ):
        self._plan = plan
        self._sampler = sampler
        self._learner = learner
        self._around = around or Surroundings()
        self._telling = Telling(log)
        self._keeping = Keeping(plan, learner, self._telling, self._around)
        self._handed_over: Path | None = None

    def run(self) -> RunEnded:
        """Until the last step, or until `stop` says so: then with a checkpoint after the step in flight. Raises OtherSpec,
        NoCheckpoint, and what sampler and learner raise, having told that the run failed."""
        began_s = self._around.clock_s()
        step, reason = self._begin(), "failed"
        try:
            self._hand_over(step)
            if step == 0:
                self._evaluate(step)
            else:
                self._keeping.keep(step)
            while step < self._plan.total_steps and not self._around.stopping():
                step += 1
                self._train(step)
                self._evaluate(step)
                self._keeping.keep(step)
            reason = self._finish(step)
        finally:
            ended = RunEnded(step, reason, self._around.clock_s() - began_s)
            self._telling.tell(ended)
            self._forget_handed_over(None)
            for place in self._plan.adapter_paths:
                with contextlib.suppress(OSError):
                    place.rmdir()
        return ended

    def _begin(self) -> int:
        reached = self._telling.reached_step()
        found = self._keeping.resume()
        if found:
            self._telling.recall(found.state["history"])
        self._telling.tell(self._started(found, reached))
        return found.step if found else 0

    def _started(self, found: Checkpoint | None, reached: int) -> RunStarted:
        return RunStarted(
            step=found.step if found else 0,
            total_steps=self._plan.total_steps,
            seed=self._plan.seed,
            spec_digest=self._plan.spec_digest,
            device=self._around.machine.device,
            devices=self._around.machine.devices,
            resumed=found is not None,
            reached_step=reached if self._plan.resume_mode == "latest" else 0,
            passed_over=found.passed_over if found else (),
            start_up_s=self._around.machine.start_up_s,
        )

    # -- one step --------------------------------------------------------------------------------------------------------

    def _train(self, step: int) -> None:
        seconds: dict[str, float] = {}
        tasks = training_tasks(self._plan.order, step, self._plan.n_samples_per_prompt)
        with self._around.timed(seconds, "play"):
            played = self._sampler.play(tasks, self._plan.sampling) if self._sampler else None
            trajectories: Sequence[Trajectory] = self._around.ranks.shared(played)
        with self._around.timed(seconds, "switch"):
            if self._sampler:
                self._sampler.sleep()
        with self._around.timed(seconds, "learn"):
            learned = self._learner.update(trajectories, step=step)
        with self._around.timed(seconds, "switch"):
            if self._sampler:
                self._sampler.wake()
        with self._around.timed(seconds, "hand over"):
            self._hand_over(step)
        self._telling.tell(measures.step_event(step, self._plan.order.epoch_of(step), trajectories, seconds, learned))

    def _hand_over(self, step: int) -> None:
        """The learner's policy becomes the sampler's. Before the first step that is the base, which the first adapter equals."""
        if step == 0:
            if self._sampler:
                self._sampler.use_base()
            return
        folder = self._written_adapter(step)
        if self._sampler:
            self._sampler.use_adapter(folder, step)
        self._forget_handed_over(folder)

    def _written_adapter(self, step: int) -> Path:
        """In the first of the places that takes it. Nothing can go on without it, so that a full disk is waited for."""
        places = self._plan.adapter_paths
        for tried, place in enumerate(cycle(places), 1):
            folder = place / f"step_{step}"
            if self._telling.attempt(step, "adapter", lambda folder=folder: self._keeping.write_adapter(folder)):
                return folder
            if tried % len(places) == 0:
                self._around.sleep_s(RETRY_S)
        raise ValueError("a plan without adapter_paths")

    def _forget_handed_over(self, newer: Path | None) -> None:
        if self._handed_over and self._around.ranks.rank == 0:
            shutil.rmtree(self._handed_over, ignore_errors=True)
        self._handed_over = newer

    # -- evaluation ------------------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> None:
        if not self._sampler:
            return
        for held_out in self._plan.evaluation.due(step, self._plan.total_steps):
            for decoding, sampling in self._plan.evaluation.decodings.items():
                self._play_set(self._sampler, step, held_out, decoding, sampling)

    def _play_set(self, sampler: Sampler, step: int, held_out: EvaluationSet, decoding: Decoding, sampling: Sampling) -> None:
        seconds: dict[str, float] = {}
        with self._around.timed(seconds, f"evaluate {held_out.name} {decoding}"):
            trajectories = sampler.play(evaluation_tasks(held_out, self._plan.evaluation.seed), sampling)
        file = Path("evals", f"step_{step}", f"{held_out.name}-{decoding}.jsonl")
        written = self._telling.attempt(step, "evaluation file", lambda: self._write_played(file, trajectories))
        told = str(file) if written else ""
        self._telling.tell(measures.eval_event(step, held_out.name, decoding, trajectories, sum(seconds.values()), told))

    def _write_played(self, file: Path, trajectories: Sequence[Trajectory]) -> None:
        place = self._plan.run_path / file
        place.parent.mkdir(parents=True, exist_ok=True)
        rows = (measures.played(one, self._plan.maze).as_dict() for one in trajectories)
        write_whole(place, "".join(f"{json.dumps(row)}\n" for row in rows).encode())

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _finish(self, step: int) -> str:
        """A run that was stopped keeps its step; one that is done waits a while for a disk that does not take its result."""
        if step < self._plan.total_steps:
            if step > 0:
                self._keeping.checkpoint(step)
            return "unsaved" if self._keeping.checkpoint_owed else "stopped"
        for _ in range(LAST_TRIES):
            if not self._keeping.owed or self._around.stopping():
                break
            self._around.sleep_s(RETRY_S)
            self._keeping.keep(step)
        return "unsaved" if self._keeping.owed else "finished"
