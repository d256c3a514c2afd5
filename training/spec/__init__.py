"""What a run is to do: one typed spec for both backends, with SkyRL's key names and defaults and our own below `loramux`."""

from training.spec.checking import Inert, check, check_local, data_parallel_size, inert_locally
from training.spec.errors import BadTrainSpec
from training.spec.ours import Evaluation, Loramux, Publish, TrainingMazes
from training.spec.sections import (
    Generator,
    InferenceEngine,
    Lora,
    Optimizer,
    Placement,
    SamplingParams,
    Trainer,
)
from training.spec.train_spec import TrainSpec

VISION_MODULES = r".*\bvisual\b.*"

__all__ = [
    "VISION_MODULES",
    "BadTrainSpec",
    "Evaluation",
    "Generator",
    "Inert",
    "InferenceEngine",
    "Lora",
    "Loramux",
    "Optimizer",
    "Placement",
    "Publish",
    "SamplingParams",
    "TrainSpec",
    "Trainer",
    "TrainingMazes",
    "check",
    "check_local",
    "data_parallel_size",
    "inert_locally",
]
