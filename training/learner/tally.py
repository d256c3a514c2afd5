"""What an update came to: sums over micro-batches and processes, and where the time went."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from training.grpo import approx_kl
from training.learner.parallel import World


class Tally:
    """Sums and largest values by name; everything stays on the device until `totals`, so that no micro-batch waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=world.device))
        self._largest: dict[str, Tensor] = {}

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self._sums[name] += value.detach() if isinstance(value, Tensor) else value

    def most(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._largest[name] = torch.maximum(self._largest.get(name, value), value)

    def totals(self) -> dict[str, float]:
        """Over all processes, which know the same names."""
        sums, largest = sorted(self._sums), sorted(self._largest)
        found: dict[str, float] = {}
        if sums:
            found |= zip(sums, self._world.sum(torch.stack([self._sums[name] for name in sums])).tolist(), strict=True)
        if largest:
            found |= zip(
                largest, self._world.largest(torch.stack([self._largest[name] for name in largest])).tolist(), strict=True
            )
        return found


def add_drift(tally: Tally, log_probs_bt: Tensor, sampler_bt: Tensor, mask_bt: Tensor) -> None:
    """How far the learner's log-probs of sampled tokens are from the sampler's, which are of the same policy. `drift_k1` and
    `drift_k3` estimate KL(sampler, learner) in nats a token (Schulman, "Approximating KL divergence", 2020)."""
    apart_bt = (log_probs_bt - sampler_bt).abs() * mask_bt
    tally.add(
        drift_tokens=mask_bt.sum(),
        drift_abs=apart_bt.sum(),
        drift_k1=approx_kl(sampler_bt, log_probs_bt, mask_bt, "k1").sum(),
        drift_k3=approx_kl(sampler_bt, log_probs_bt, mask_bt, "k3").sum(),
    )
    tally.most(drift_max=apart_bt.max())


class Stopwatch:
    """Seconds by name. On a GPU each part waits for what it started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] += time.perf_counter() - started
