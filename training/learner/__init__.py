"""The learner: GRPO on a LoRA of the language modules, in one process or in several under FSDP2."""

from training.learner.learner import Learner, StaleData
from training.learner.parallel import World, alone, join, leave
from training.learner.policy import BadPolicy
from training.learner.rows import BadTrajectory
from training.learner.state import BadState

__all__ = ["BadPolicy", "BadState", "BadTrajectory", "Learner", "StaleData", "World", "alone", "join", "leave"]
