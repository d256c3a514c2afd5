"""The learner: trajectories of the policy that it holds make the next one, by GRPO on a LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from training.grpo import approx_kl, policy_loss, total_loss
from training.learner.adapter_files import write_adapter
from training.learner.parallel import World, alone, shard, sync_gradients, whole
from training.learner.pictures import Grid, Seen
from training.learner.plan import Credit, MiniBatch, credit, cut, is_live, mini_batches
from training.learner.policy import Precision, load_policy
from training.learner.rate import planned_steps, rate, steps_per_batch
from training.learner.rows import MicroBatch, Row, group_of, micro_batch, padded_log_probs, row_of
from training.learner.state import captured, read_state, restore, state_file, write_state
from training.learner.tally import Stopwatch, Tally, add_drift
from training.maze import Episode
from training.spec import TrainSpec
from training.trajectory import Trajectory

# What an update without anything to learn from has none of.
TALLIED = (
    "loss",
    "policy_loss",
    "entropy",
    "held",
    "tokens",
    "kl",
    "drift_tokens",
    "drift_abs",
    "drift_max",
    "drift_k1",
    "drift_k3",
)


class StaleData(ValueError):
    """Trajectories of another policy than the learner holds; says which, and of which steps."""


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch of this process with what its loss needs, [B, T] each: the reduced advantages, what counts (sampled, and
    not filtered), the sampler's log-probs."""

    micro: MicroBatch
    weights_bt: Tensor
    mask_bt: Tensor
    sampler_bt: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's trajectories, cut: for each mini-batch its rows and this process's works."""

    rows: tuple[Row, ...]
    minis: tuple[MiniBatch, ...]
    works: tuple[tuple[Work, ...], ...]
    filtered: int
    live: int


Place = tuple[int, int]  # of a work: mini-batch, micro-batch


class Learner:
    """Holds the policy of `policy_step` (0: the base with a LoRA that does nothing yet). With several processes each makes one
    of the same spec, and calls the same methods with the same trajectories. Raises BadPolicy."""

    def __init__(self, spec: TrainSpec, world: World | None = None) -> None:
        self.world = world or alone(spec.loramux.device)
        self.trainer, self.algorithm = spec.trainer, spec.trainer.algorithm
        self.lora, self.base = spec.trainer.policy.model.lora, Path(spec.trainer.policy.model.path or "")
        self.base_name = spec.loramux.publish.base or self.base.name
        self.precision = Precision.of(spec.loramux.dtype, self.world.device.type, spec.trainer.bf16)
        self.policy, self.eye = load_policy(
            self.base,
            self.lora,
            self.precision,
            self.world.device,
            seed=spec.trainer.seed,
            gradient_checkpointing=spec.trainer.gradient_checkpointing,
        )
        shard(self.policy, self.policy.layers, self.world, spec.trainer.policy.fsdp_config.reshard_after_forward)
        self.weights = self.policy.trained()
        self.optimizing = spec.trainer.policy.optimizer_config
        self.optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=self.optimizing.lr,
            betas=self.optimizing.adam_betas,
            weight_decay=self.optimizing.weight_decay,
        )
        self.steps_per_batch, self.planned_steps = steps_per_batch(spec), planned_steps(spec)
        self.policy_step = 0
        self.optimizer_steps = 0

    # One step

    def update(self, trajectories: Sequence[Trajectory], *, step: int) -> dict[str, float]:
        """Makes the policy of `step` from trajectories of the one before, which this learner holds, and says what it came to.

        Each mini-batch of `policy_mini_batch_size` groups is one optimizer step, `update_epochs_per_batch` times over. Old
        log-probs are the learner's own, recomputed before the first optimizer step; those of the first mini-batch are the ones
        that its own pass computes anyway. Raises StaleData and BadTrajectory; nothing has changed then.
        """
        self._refuse_stale(trajectories, step)
        watch, tally = Stopwatch(self.world.device), Tally(self.world)
        with watch("rows"):
            batch = self._batch(trajectories)
        with watch("pictures"):
            seen = self._seen(batch)
        with watch("old_log_probs"):
            old = self._old_log_probs(batch, seen)
        with watch("reference"):
            reference = self._reference(batch, seen)
        norms: list[float] = []
        places = count((step - 1) * self.steps_per_batch)
        for _ in range(self.trainer.update_epochs_per_batch):
            for at in range(len(batch.minis)):
                place = next(places)
                with watch("forward_backward"):
                    self._accumulate(batch, at, seen, old, reference, tally)
                with watch("optimizer"):
                    norms += self._optimizer_step(place) if batch.works[at] else []
        for place, work in _places(batch):
            add_drift(tally, old[place], work.sampler_bt, work.mask_bt)
        self.policy_step = step
        return self._metrics(batch, tally.totals(), norms, watch)

    def _refuse_stale(self, trajectories: Sequence[Trajectory], step: int) -> None:
        held = self.policy_step
        if step != held + 1:
            raise StaleData(f"step is {step}: the learner holds the policy of step {held}, so the next is {held + 1}")
        if not trajectories:
            raise StaleData(f"step {step} has no trajectories")
        for trajectory in trajectories:
            if trajectory.policy_step != held:
                raise StaleData(
                    f"{trajectory.task} was sampled by the policy of step {trajectory.policy_step}: not of step {held}"
                )

    def _batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        rows = tuple(row_of(trajectory, self.policy.image_token_id, self._grid_of) for trajectory in trajectories)
        groups = [group_of(trajectory) for trajectory in trajectories]
        sampler_bt, sampled_bt = padded_log_probs(rows)
        micro = self.trainer.micro_train_batch_size_per_gpu
        planned = mini_batches(groups, self.trainer.policy_mini_batch_size)
        found = credit([row.reward for row in rows], groups, sampled_bt, planned, self.algorithm, micro)
        live = is_live(found, self.algorithm)
        minis = cut(planned, live, groups, list(map(len, rows)), micro, self.world.rank, self.world.size)
        works = tuple(tuple(self._work(rows, chosen, found, sampler_bt) for chosen in mini.micro_batches) for mini in minis)
        return Batch(rows, tuple(minis), works, found.filtered, sum(live))

    def _work(self, rows: Sequence[Row], chosen: tuple[int, ...], found: Credit, sampler_bt: Tensor) -> Work:
        micro = micro_batch(rows, chosen, self.policy.pad_id).to(self.world.device)
        length = micro.mask_bt.shape[1]

        def of_chosen(values_bt: Tensor) -> Tensor:
            cropped = values_bt[list(chosen), :length] if chosen else torch.zeros(1, length)
            return cropped.to(self.world.device)

        return Work(micro, *map(of_chosen, (found.weights_bt, found.mask_bt, sampler_bt)))

    def _grid_of(self, state: Episode) -> Grid:
        assert self.eye is not None, f"{self.base} sees no pictures"
        return self.eye.grid(state)

    def _seen(self, batch: Batch) -> Mapping[Episode, Seen]:
        pictured = [state for _, work in _places(batch) for state in work.micro.pictured]
        return self.eye.see(pictured) if self.eye and pictured else {}

    # Passes over micro-batches

    def _log_probs(self, work: Work, seen: Mapping[Episode, Seen]) -> Tensor:
        return self.policy(work.micro, seen, self.algorithm.temperature)[0]

    def _old_log_probs(self, batch: Batch, seen: Mapping[Episode, Seen]) -> dict[Place, Tensor]:
        """Those that have to be known before the first optimizer step. The first mini-batch's pass runs before it too, and
        gives the same, unless dropout is on."""
        first = 0 if self.lora.dropout else 1
        self.policy.eval()
        with torch.no_grad():
            return {place: self._log_probs(work, seen) for place, work in _places(batch) if place[0] >= first}

    def _reference(self, batch: Batch, seen: Mapping[Episode, Seen]) -> dict[Place, Tensor]:
        if not self.algorithm.use_kl_loss:
            return {}
        self.policy.eval()
        with self.policy.as_reference():
            return {place: self._log_probs(work, seen) for place, work in _places(batch)}

    def _accumulate(
        self,
        batch: Batch,
        at: int,
        seen: Mapping[Episode, Seen],
        old: dict[Place, Tensor],
        reference: Mapping[Place, Tensor],
        tally: Tally,
    ) -> None:
        """Adds up the gradients of mini-batch `at`; keeps in `old` what was not known."""
        self.policy.train()
        works = batch.works[at]
        for index, work in enumerate(works):
            sync_gradients(self.policy, index == len(works) - 1)
            with_entropy = self.algorithm.use_entropy_loss
            new_bt, entropy_bt = self.policy(work.micro, seen, self.algorithm.temperature, with_entropy)
            old_bt = old.setdefault((at, index), new_bt.detach())
            surrogate, held = policy_loss(new_bt, old_bt, work.weights_bt, work.mask_bt, self.algorithm)
            kl_bt = None
            if (reference_bt := reference.get((at, index))) is not None:
                kl_bt = approx_kl(new_bt, reference_bt, work.mask_bt, self.algorithm.kl_estimator_type)
                tally.add(kl=kl_bt.sum())
            share = len(work.micro.rows) / len(batch.minis[at].rows)
            loss = total_loss(surrogate, kl_bt, entropy_bt if with_entropy else None, work.mask_bt, share, self.algorithm)
            loss.backward()
            tokens = work.mask_bt.sum()
            tally.add(
                loss=loss, policy_loss=surrogate, tokens=tokens, held=held * tokens, entropy=(entropy_bt * work.mask_bt).sum()
            )

    def _optimizer_step(self, place: int) -> list[float]:
        """The norm of the gradients before they were clipped. With one that is no number there is no step, as in SkyRL."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.optimizing, self.optimizer_steps, place, self.planned_steps)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.weights.values(), self.optimizing.max_grad_norm)).item()
        if norm < float("inf"):
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return [norm]

    def _metrics(self, batch: Batch, totals: Mapping[str, float], norms: Sequence[float], watch: Stopwatch) -> dict[str, float]:
        found = {**dict.fromkeys(TALLIED, 0.0), **totals}
        steps, tokens, drifted = max(len(norms), 1), found["tokens"] or 1, found["drift_tokens"] or 1
        finite = [norm for norm in norms if norm < float("inf")]
        metrics = {
            "policy/final_loss": found["loss"] / steps,
            "policy/policy_loss": found["policy_loss"] / steps,
            "policy/policy_entropy": found["entropy"] / tokens,
            "policy/loss_metrics/clip_ratio": found["held"] / tokens,
            "policy/policy_lr": self.optimizer.param_groups[0]["lr"],
            "policy/raw_grad_norm": sum(finite) / max(len(finite), 1),
            "policy/optimizer_steps": float(len(finite)),
            "policy/skipped_steps": float(len(norms) - len(finite)),
            "policy/rollout_train_logprobs_abs_diff_mean": found["drift_abs"] / drifted,
            "policy/rollout_train_logprobs_abs_diff_max": found["drift_max"],
            "policy/rollout_train_kl_k1": found["drift_k1"] / drifted,
            "policy/rollout_train_kl_k3": found["drift_k3"] / drifted,
            "policy/trained_tokens": found["drift_tokens"],
            "policy/trained_rows": float(batch.live),
            "reward/num_zero_variance_filtered": float(batch.filtered),
        }
        if self.algorithm.use_kl_loss:
            metrics["policy/policy_kl"] = found["kl"] / tokens
        return metrics | {f"timing/learner/{name}_s": seconds for name, seconds in watch.seconds.items()}

    # What is kept

    def save_adapter(self, folder: Path) -> None:
        """PEFT's two files in `folder`, weights in float32, complete or absent. Of several processes the first writes, and raises
        OSError alone; the others do not wait for it."""
        weights = {name: whole(weight.detach()) for name, weight in self.weights.items()}
        if self.world.rank == 0:
            write_adapter(folder, self.policy.adapted, weights, self.base_name)

    def save_state(self, folder: Path) -> None:
        """This process's share of all that the next step depends on, as one file in `folder`. Raises OSError."""
        counts = {"policy_step": self.policy_step, "optimizer_steps": self.optimizer_steps}
        write_state(state_file(folder, self.world), counts | captured(self.weights, self.optimizer, self.world.device))

    def load_state(self, folder: Path) -> None:
        """Continues as the learner that saved it would have, bit for bit on CPUs with as many threads. Raises BadState."""
        state = read_state(state_file(folder, self.world))
        restore(state, self.weights, self.optimizer, self.world.device)
        self.policy_step, self.optimizer_steps = state["policy_step"], state["optimizer_steps"]


def _places(batch: Batch) -> Iterator[tuple[Place, Work]]:
    for at, works in enumerate(batch.works):
        for index, work in enumerate(works):
            yield (at, index), work
