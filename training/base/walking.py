"""Second lesson: the language layers learn to act on what the tower sees.

The tower has learnt the way and stays as it is. Cut short, this lesson leaves a base that walks as somebody who was only shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.base.demonstrations import Demonstration
from training.learner.pictures import Eye, looks
from training.learner.policy import as_encoded
from training.learner.rows import Row, micro_batch, row_of
from training.maze import messages, observe
from training.maze.actions import as_text
from training.rollouts.conversation import Wording
from training.trajectory import Task, Trajectory

ALIKE = 4  # walks at once, alike in length: padding costs as much as walking


@dataclass(frozen=True, slots=True)
class Shown:
    """A demonstration as tokens. `wanted` are the tokens to be learnt in place of the row's replies, reply by reply."""

    row: Row
    wanted: tuple[tuple[int, ...], ...]


class Teller:
    """Demonstrations as the conversations that they would be."""

    def __init__(self, tokenizer: Any, eye: Eye) -> None:
        self._wording, self._eye = Wording(tokenizer), eye
        self._encode = lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
        self._image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def show(self, walk: Demonstration) -> Shown:
        ids = list(self._wording.prompt(messages(walk.states[0], with_pictures=False)))
        begins, mask = len(ids), []
        for turn, action in enumerate(walk.taken):
            reply = self._reply(walk, action)
            seen_next = walk.turns[turn] if turn + 1 < len(walk.states) else None
            between = self._wording.between(reply, observe(seen_next, with_pictures=False)) if seen_next else ()
            ids += [*reply, *between]
            mask += [1] * len(reply) + [0] * len(between)
        wanted = tuple(self._reply(walk, action) for action in walk.wanted)
        return Shown(row_of(_as_played(walk, ids, begins, mask), self._image_token_id, self._eye.grid), wanted)

    def _reply(self, walk: Demonstration, action: str) -> tuple[int, ...]:
        return (*self._encode(as_text(action, walk.states[0].spec.actions)), self._wording.end_of_turn)


def _as_played(walk: Demonstration, ids: Sequence[int], begins: int, mask: Sequence[int]) -> Trajectory:
    """As if the base had sampled what was taken; nobody did, so there are no log-probs and no reward."""
    return Trajectory(
        task=Task(walk.states[0].seed),
        policy_step=0,
        token_ids=tuple(ids),
        prompt_tokens=begins,
        loss_mask=tuple(mask),
        log_probs=(0.0,) * len(mask),
        pictured=walk.states,
        replies=walk.taken,
        outcomes=tuple(turn.outcome for turn in walk.turns),
        reward=0.0,
        solved=False,
        stop_reason="shown",
    )


def walks(teller: Teller, shown: Iterator[Demonstration], batch: int) -> Iterator[list[Shown]]:
    while True:
        yield [teller.show(walk) for walk in islice(shown, batch)]


def walking_loss(model: Any, eye: Eye, shown: Sequence[Shown], pad_id: int) -> tuple[Tensor, float]:
    """(mean cross entropy of the wanted tokens, in nats; the share of replies that are right at every token)."""
    alike = sorted(shown, key=lambda one: len(one.row))
    parts = [alike[at : at + ALIKE] for at in range(0, len(alike), ALIKE)]
    found = [_of_part(model, eye, part, pad_id) for part in parts]
    tokens = sum(len(reply) for one in shown for reply in one.wanted)
    replies = sum(len(one.wanted) for one in shown)
    return torch.stack([loss for loss, _ in found]).sum() / tokens, sum(right for _, right in found) / replies


def _of_part(model: Any, eye: Eye, shown: Sequence[Shown], pad_id: int) -> tuple[Tensor, int]:
    """(summed cross entropy, how many replies are right)."""
    device = model.lm_head.weight.device
    batch = micro_batch([one.row for one in shown], range(len(shown)), pad_id).to(device)
    seen = eye.see(batch.pictured)
    hidden_blh = model.model(
        input_ids=batch.input_ids_bl,
        position_ids=batch.positions_3bl,
        mm_encoder_outputs={"image": as_encoded([seen[looks(state)] for state in batch.pictured])},
        use_cache=False,
    ).last_hidden_state
    logits_mv = model.lm_head(hidden_blh.flatten(0, 1)[batch.before]).float()
    replies = [reply for one in shown for reply in one.wanted]
    wanted_m = torch.tensor([token for reply in replies for token in reply], device=device)
    is_right = (logits_mv.argmax(-1) == wanted_m).tolist()
    ends = torch.tensor([len(reply) for reply in replies]).cumsum(0).tolist()
    right = sum(all(is_right[end - len(reply) : end]) for end, reply in zip(ends, replies, strict=True))
    return F.cross_entropy(logits_mv, wanted_m, reduction="sum"), right
