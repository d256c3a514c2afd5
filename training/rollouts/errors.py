"""What can go wrong with rollouts."""

from __future__ import annotations


class BadRollout(ValueError):
    """An episode that can't be played as the spec says; names the field, the value and the limit."""


class BadAdapter(ValueError):
    """A folder that the engine takes no adapter from; says why."""


class BadTemplate(ValueError):
    """A chat template that conversations can't be continued with token by token; says what it does."""


class EngineDied(RuntimeError):
    """An engine that is no more, or that nothing is known of any more; says which one, and what it said last."""


REFUSED = (BadRollout, BadAdapter, BadTemplate)  # after these an engine is as it was
