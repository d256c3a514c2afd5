"""Rollouts: episodes played by vLLM with the policy that is trained, token by token."""

from training.rollouts.engines import Rollouts
from training.rollouts.errors import BadAdapter, BadRollout, BadTemplate, EngineDied

__all__ = ["BadAdapter", "BadRollout", "BadTemplate", "EngineDied", "Rollouts"]
