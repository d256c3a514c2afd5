"""TrainSpec: everything about one run, and how it is read, told apart and written down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from training.spec.errors import BadTrainSpec, explained
from training.spec.ours import Loramux
from training.spec.sections import Data, Environment, Generator, Part, Trainer
from training.spec.values import following, keyed, laid_over, read_yaml

DIGEST_CHARACTERS = 16


class TrainSpec(Part):
    """One run, for either backend. Made of files and overrides by `load`, of plain values by `from_values`."""

    data: Data = Data()
    trainer: Trainer = Trainer()
    generator: Generator = Generator()
    environment: Environment = Environment()
    loramux: Loramux = Loramux()

    @staticmethod
    def load(file: Path, overrides: Iterable[str] = ()) -> TrainSpec:
        """A YAML file with `key.path=value` laid over it. Raises BadTrainSpec."""
        try:
            text = file.read_text()
        except OSError as error:
            raise BadTrainSpec([f"the spec file {file} cannot be read: {error.strerror}"]) from None
        return TrainSpec.from_values(read_yaml(text, str(file)), overrides)

    @staticmethod
    def from_values(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> TrainSpec:
        """Plain nested values with `key.path=value` laid over them. Raises BadTrainSpec, which names every key at fault."""
        merged = following(laid_over(values, overrides))
        try:
            return TrainSpec.model_validate_json(json.dumps(merged, default=str))
        except ValidationError as error:
            raise BadTrainSpec(explained(error, known_keys())) from None

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values, every key among them."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """A spec file of every key; it reads as an equal spec."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False)

    def digest(self) -> str:
        """Of every key and value, the same in any process."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]

    def values(self) -> dict[str, Any]:
        """Dotted keys with their values; dictionaries that are free are one value."""
        return keyed(self)

    def differences(self, other: TrainSpec) -> dict[str, tuple[Any, Any]]:
        """Dotted keys that differ, each with this spec's value and the other's."""
        theirs = other.values()
        return {key: (value, theirs[key]) for key, value in self.values().items() if value != theirs[key]}

    @property
    def ckpt_folder(self) -> Path:
        return Path(self.trainer.ckpt_path).expanduser()

    @property
    def export_folder(self) -> Path:
        return Path(self.trainer.export_path).expanduser()


def known_keys() -> tuple[str, ...]:
    """Of values and of the sections that they lie in."""
    keys = keyed(TrainSpec())
    sections = {key.rsplit(".", level)[0] for key in keys for level in range(1, key.count(".") + 1)}
    return (*keys, *sorted(sections))
