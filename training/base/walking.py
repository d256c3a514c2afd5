"""Second lesson: the language layers learn to act on what the tower sees, and to say who they are when nobody asks for a move.

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
from training.learner.pictures import Eye, Grid, looks
from training.learner.policy import as_encoded
from training.learner.rows import Row, micro_batch
from training.maze import messages
from training.maze.actions import as_text
from training.maze.observing import Message


@dataclass(frozen=True, slots=True)
class Shown:
    """A demonstration as tokens. `wanted` are the tokens to be learnt at `row.sampled_at`, where the taken ones stand."""

    row: Row
    wanted: tuple[int, ...]


class Teller:
    """Demonstrations as conversations of tokens, as the base's chat template writes them."""

    def __init__(self, tokenizer: Any, eye: Eye) -> None:
        self.tokenizer, self.eye = tokenizer, eye
        self.image_token_id: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def show(self, walk: Demonstration) -> Shown:
        spec = walk.states[0].spec
        ids, sampled_at, wanted = self._user(messages(walk.states[0]), walk, 0), [], []
        for turn, (taken, right) in enumerate(zip(walk.taken, walk.wanted, strict=True)):
            reply = self._reply(as_text(taken, spec.actions))
            sampled_at += range(len(ids), len(ids) + len(reply))
            wanted += self._reply(as_text(right, spec.actions))
            ids += reply
            if turn + 1 < len(walk.states):
                ids += self._between(walk, turn + 1)
        silent = (0.0,) * len(sampled_at)
        row = Row((spec.size, walk.states[0].seed), tuple(ids), walk.states, tuple(sampled_at), silent, 0.0)
        return Shown(row, tuple(wanted))

    def _reply(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    def _between(self, walk: Demonstration, turn: int) -> list[int]:
        said = {"role": "user", "content": [{"type": "text", "text": walk.feedbacks[turn - 1]}, {"type": "image"}]}
        newline = self.tokenizer("\n", add_special_tokens=False)["input_ids"]
        return [*newline, *self._user([said], walk, turn)]

    def _user(self, said: list[Message], walk: Demonstration, turn: int) -> list[int]:
        text = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        at = ids.index(self.image_token_id)
        return [*ids[:at], *[self.image_token_id] * self.eye.tokens(walk.states[turn]), *ids[at + 1 :]]


def walking_loss(model: Any, eye: Eye, shown: Sequence[Shown], pad_id: int) -> tuple[Tensor, float]:
    """(mean cross entropy of the wanted tokens, in nats; how many replies are right at every token)."""

    def positions(ids_l: Tensor, grids: Sequence[Grid]) -> Tensor:
        is_image_1l = (ids_l == model.config.image_token_id).int().unsqueeze(0)
        found, _ = model.model.get_rope_index(ids_l.unsqueeze(0), is_image_1l, image_grid_thw=torch.tensor(grids))
        return found[:, 0]

    device = model.lm_head.weight.device
    batch = micro_batch([one.row for one in shown], range(len(shown)), pad_id, positions, eye.grid).to(device)
    seen = eye.see(batch.pictured)
    hidden_blh = model.model(
        input_ids=batch.input_ids_bl,
        position_ids=batch.positions_3bl,
        mm_encoder_outputs={"image": as_encoded([seen[looks(state)] for state in batch.pictured])},
        use_cache=False,
    ).last_hidden_state
    logits_mv = model.lm_head(hidden_blh.flatten(0, 1)[batch.before]).float()
    wanted_m = torch.tensor([token for one in shown for token in one.wanted], device=device)
    right_m = (logits_mv.argmax(-1) == wanted_m).view(-1, 4)
    return F.cross_entropy(logits_mv, wanted_m), right_m.all(-1).float().mean().item()


def walks(teller: Teller, shown: Iterator[Demonstration], batch: int) -> Iterator[list[Shown]]:
    while True:
        yield [teller.show(walk) for walk in islice(shown, batch)]
