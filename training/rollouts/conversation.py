"""A conversation as token ids that are never made again: what was sampled stays, what stands between is the chat template's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from training.rollouts.errors import BadTemplate

Message = dict[str, Any]

REPLY = "-REPLY-"
ANYTHING = "-ANYTHING-"


class Wording:
    """How a base's chat template words conversations. Pictures are one image token each, as the template has them.

    `tokenizer` is the base's own (transformers). Raises BadTemplate unless a longer conversation begins with exactly what the
    shorter one was, and a reply ends with one token.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._ids = cache(self._encoded)
        question: list[Message] = [{"role": "user", "content": ANYTHING}]
        self._asked = self._rendered(question)
        self.end_of_turn = self._end_of_turn(self._after(question))

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of the conversation's begin, up to where a reply is to follow."""
        return self._ids(self._rendered(messages))

    def between(self, reply_ids: Sequence[int], observed: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow a sampled reply, up to where the next one is to follow; the end of the turn is among them unless the
        reply has it already (it hasn't if it was cut)."""
        ids = self._ids(self._after(observed))
        return ids[1:] if reply_ids and reply_ids[-1] == self.end_of_turn else ids

    def _rendered(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._template_kwargs
        )
        return text

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _after(self, observed: Sequence[Message]) -> str:
        """What the template puts after a reply that `observed` follows."""
        talk = [{"role": "user", "content": ANYTHING}, {"role": "assistant", "content": REPLY}, *observed]
        before, found, after = self._rendered(talk).rpartition(REPLY)
        if not found or before != self._asked:
            raise BadTemplate(
                f"the chat template does not continue conversations: it words their begin as {self._asked!r} before a reply, "
                f"and as {before!r} after it"
            )
        return after

    def _end_of_turn(self, after: str) -> int:
        first = self._ids(after)[0]
        text = self._tokenizer.decode([first])
        if not after.startswith(text) or first not in self._tokenizer.all_special_ids:
            raise BadTemplate(f"the chat template ends a reply with {after[:40]!r}: it has to be a special token")
        return first
