"""Whether a run may go on from a checkpoint of another specification: only where what changed does not change what is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A key, or all keys below one. What is played, learned from and with which dice is none of these.
HARMLESS = (
    "trainer.epochs",
    "trainer.eval_interval",
    "trainer.eval_before_train",
    "trainer.eval_batch_size",
    "trainer.ckpt_interval",
    "trainer.hf_save_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.resume_mode",
    "trainer.resume_path",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.logger",
    "trainer.log_path",
    "trainer.project_name",
    "trainer.run_name",
    "trainer.policy.model.lora.lora_sync_path",
    "generator.eval_sampling_params",
    "generator.eval_n_samples_per_prompt",
    "loramux.evaluation",
    "loramux.publish",
)


class OtherSpec(ValueError):
    """The checkpoint is of a run that was specified otherwise; says which fields differ."""


def check_may_resume(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raises OtherSpec. Both are flat: a dotted key to a value that JSON has."""
    differing = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key) and not _is_harmless(key))
    if differing:
        told = "; ".join(f"{key} was {saved.get(key)!r}, is {now.get(key)!r}" for key in differing)
        raise OtherSpec(f"{where} is of another run: {told}. Set it back, or start over with trainer.resume_mode=none")


def _is_harmless(key: str) -> bool:
    return any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS)
