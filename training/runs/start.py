"""Starts what a specification says: engine and learner once, then a run for each seed, each in a folder of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers.utils import logging as transformers_logging

from training.learner import BadPolicy, BadState, Learner, World
from training.publishing.of_spec import publisher_of
from training.rollouts import Rollouts
from training.rollouts.errors import REFUSED, EngineDied
from training.runs import report
from training.runs.checkpoints import NoCheckpoint, write_whole
from training.runs.evaluating import BadAdapter
from training.runs.events import FILE, EventLog, RunEnded
from training.runs.from_spec import plan_of, seeded
from training.runs.interval import NothingMeasured
from training.runs.loop import Loop
from training.runs.plan import BadPlan, Plan
from training.runs.processes import Group, die_with_parent, joined, leading
from training.runs.protocols import Publisher, Sampler
from training.runs.ranks import Alone, Ranks
from training.runs.resuming import OtherSpec
from training.runs.stopping import Stopping
from training.runs.summary import NoRun
from training.runs.surroundings import Machine, Surroundings
from training.runs.watching import Watching
from training.spec import BadTrainSpec, TrainSpec, check_local, data_parallel_size

LOCK = ".lock"


class Busy(ValueError):
    """Another process works in the folder."""


# What says all by its text; anything else that is raised needs a trace.
REFUSALS = (
    *REFUSED,
    EngineDied,
    BadAdapter,
    BadPlan,
    BadPolicy,
    BadState,
    BadTrainSpec,
    Busy,
    NoCheckpoint,
    NoRun,
    NothingMeasured,
    OtherSpec,
)


@dataclass(frozen=True, slots=True)
class Job:
    """`folder` holds the run, or with several seeds one folder a run. `keep_paths` leaves checkpoints and exports where the spec
    says. `config` is the settings file for the registry."""

    spec: TrainSpec
    folder: Path
    seeds: tuple[int, ...]
    keep_paths: bool = False
    config: Path | None = None

    def plans(self) -> tuple[Plan, ...]:
        """Raises BadTrainSpec and BadPlan."""
        check_local(self.spec)
        return tuple(self._plan(seed) for seed in self.seeds)

    def _plan(self, seed: int) -> Plan:
        spec = seeded(self.spec, seed)
        if len(self.seeds) == 1:
            return plan_of(spec, self.folder, keep_paths=self.keep_paths)
        return plan_of(spec, self.folder / f"seed-{seed}")

    def as_json(self) -> str:
        parts = {"folder": str(self.folder), "seeds": self.seeds, "keep_paths": self.keep_paths}
        return json.dumps({"spec": self.spec.as_dict(), **parts})

    @classmethod
    def from_json(cls, text: str) -> Job:
        found = json.loads(text)
        spec = TrainSpec.from_values(found["spec"])
        return cls(spec, Path(found["folder"]), tuple(found["seeds"]), found["keep_paths"])


@dataclass(frozen=True, slots=True)
class Hands:
    """What a command brings: who watches a run, who may stop it, and what is said besides."""

    watching: Callable[[Plan], Watching]
    stopping: Stopping
    say: Callable[[str], None]


def rollouts(spec: TrainSpec) -> Sampler:
    return Rollouts(spec)


def train(job: Job, hands: Hands, sampler_of: Callable[[TrainSpec], Sampler]) -> list[RunEnded]:
    """Each seed's run until its end, or until one is stopped; `sampler_of` is called once. A report is in the folder then.

    Raises BadTrainSpec, BadPlan, Busy, what `publisher_of` and `Loop.run` raise.
    """
    plans = job.plans()
    _refuse_if_unpublishable(job)
    _be_quiet()
    size = data_parallel_size(job.spec)
    follow = [sys.executable, "-m", "training.runs.start", job.as_json()]
    with contextlib.ExitStack() as stack:
        for plan in plans:
            stack.enter_context(_held(plan.run_path))
        if size > 1:
            stack.enter_context(leading(size, follow, lambda rank, code: _give_up(hands, rank, code)))
        world = stack.enter_context(joined(job.spec.loramux.device))
        sampler = sampler_of(job.spec)
        stack.callback(sampler.close)
        _set_threads(job.spec)
        began_s = psutil.Process().create_time()
        ended = []
        stack.enter_context(hands.stopping.listening())
        for plan, seed in zip(plans, job.seeds, strict=True):
            ended.append(_run(job, hands, plan, seeded(job.spec, seed), world, sampler, began_s))
            began_s = time.time()
            if ended[-1].step < plan.total_steps:
                break
    _report([plan.run_path for plan in plans[: len(ended)]], job.folder, hands)
    return ended


def _run(job: Job, hands: Hands, plan: Plan, spec: TrainSpec, world: World, sampler: Sampler, began_s: float) -> RunEnded:
    write_whole(plan.run_path / "spec.yaml", spec.to_yaml().encode())
    learner = Learner(spec, world)
    with hands.watching(plan) as watching:
        log = EventLog(plan.run_path / FILE, [watching])
        publisher = publisher_of(spec, _name_of(job, plan), log.tell, config=job.config)
        around = Surroundings(
            ranks=_ranks(world),
            publisher=publisher,
            machine=_machine(spec, world, time.time() - began_s),
            stop=hands.stopping.asked,
            phase=watching.phase,
        )
        if publisher and plan.resume_mode != "none":
            publisher.scan(plan.export_path)
        try:
            ended = Loop(plan, sampler, learner, log, around).run()
        finally:
            _close(publisher, spec, plan.export_path, hands)
    if len(job.seeds) > 1:
        _report([plan.run_path], plan.run_path, hands)
    return ended


def follow(job: Job) -> None:
    """What every rank but 0 does."""
    die_with_parent()
    _be_quiet()
    with joined(job.spec.loramux.device) as world:
        _set_threads(job.spec)
        for plan, seed in zip(job.plans(), job.seeds, strict=True):
            around = Surroundings(ranks=_ranks(world))
            ended = Loop(plan, None, Learner(seeded(job.spec, seed), world), None, around).run()
            if ended.step < plan.total_steps:
                return


def _refuse_if_unpublishable(job: Job) -> None:
    """A registry that is none is better known before the engine starts."""
    if publisher := publisher_of(job.spec, job.folder.name, config=job.config):
        publisher.close(1)


def _ranks(world: World) -> Ranks:
    return Group(world) if world.size > 1 else Alone()


def _report(folders: Sequence[Path], folder: Path, hands: Hands) -> None:
    """It can be made again from the events: a disk that does not take it costs nothing."""
    try:
        report.write(folders, folder)
    except OSError as error:
        hands.say(f"no report was written ({error}); later: loramux train report {' '.join(map(str, folders))}")


def _be_quiet() -> None:
    """What transformers says while it loads would run over what the run says."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def _set_threads(spec: TrainSpec) -> None:
    """After the engine is up, which sets torch's threads too. Bits depend on them."""
    if spec.loramux.threads:
        torch.set_num_threads(spec.loramux.threads)


def _machine(spec: TrainSpec, world: World, start_up_s: float) -> Machine:
    if world.device.type == "cpu":
        return Machine("cpu", len(os.sched_getaffinity(0)), start_up_s)
    engines = 0 if spec.trainer.placement.colocate_all else spec.generator.inference_engine.num_engines
    return Machine(world.device.type, world.size + engines, start_up_s)


def _name_of(job: Job, plan: Plan) -> str:
    return plan.run_path.absolute().name if len(job.seeds) == 1 else f"{job.folder.absolute().name}-{plan.run_path.name}"


def _close(publisher: Publisher | None, spec: TrainSpec, export_path: Path, hands: Hands) -> None:
    """What is not published by then stays, is told, and a scan of the next run finds it."""
    if publisher is None:
        return
    wanted = spec.loramux.publish
    left = publisher.close(wanted.close_timeout_s)  # the log hears of it by the publisher
    for one in left:
        hands.say(f"step {one.step} is not published ({one.reason}): it lies in {one.folder}")
    if left:
        hands.say(f"later: loramux train publish {export_path} --base {wanted.base} --name {wanted.name}")


def _give_up(hands: Hands, rank: int, code: int) -> None:
    """Nothing that is shared with a process that is gone ever comes back, on GPUs not even as an error."""
    hands.say(f"the learner's process of rank {rank} ended with code {code}: the run ends here, its checkpoints stay")
    os._exit(1)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(f"another process trains in {folder}: wait for it, or name another folder") from None
        yield


if __name__ == "__main__":
    follow(Job.from_json(sys.argv[1]))
