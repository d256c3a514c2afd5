"""Whether a run may go on from a checkpoint of another specification: only where what changed does not change what is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.spec.checking import INERT_LOCALLY

# A key, or all keys below one, beside what the local backend pays no heed to. What is played, learned from and with which dice
# is none of these.
HARMLESS = (
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.eval_interval",
    "trainer.eval_before_train",
    "trainer.ckpt_interval",
    "trainer.hf_save_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.resume_mode",
    "trainer.resume_path",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.run_name",
    "generator.eval_sampling_params",
    "generator.eval_n_samples_per_prompt",
    "loramux.evaluation",
    "loramux.publish",
    *INERT_LOCALLY,
)


# Where the rate falls until the end, these say how fast.
ENDS = ("trainer.epochs", "trainer.max_training_steps")
SCHEDULER = "trainer.policy.optimizer_config.scheduler"
CONSTANT = "constant_with_warmup"


class OtherSpec(ValueError):
    """The checkpoint is of a run that was specified otherwise; says which fields differ."""


def check_may_resume(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raises OtherSpec. Both are flat: a dotted key to a value that JSON has."""
    falls = now.get(SCHEDULER, CONSTANT) != CONSTANT
    differing = sorted(
        key
        for key in saved.keys() | now.keys()
        if saved.get(key) != now.get(key) and (not _is_harmless(key) or (falls and key in ENDS))
    )
    if differing:
        told = "; ".join(f"{key} was {saved.get(key)!r}, is {now.get(key)!r}" for key in differing)
        raise OtherSpec(f"{where} is of another run: {told}. Set it back, or start over with trainer.resume_mode=none")


def _is_harmless(key: str) -> bool:
    return any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS)
