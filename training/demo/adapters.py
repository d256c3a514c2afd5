"""Demo adapters: real PEFT LoRAs on the demo base, each trained in about a second to answer anything with its own sentence.

That makes it visible which adapter, and which version of it, answered.
"""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from training.demo.fit import Batch, Fit, Prompt, PromptMaker, Schedule, bucketed, fit, worst_probability
from training.demo.text import random_sentence

__all__ = ["AdapterTrainer", "Recipe", "random_sentence", "train_adapter", "train_adapters"]

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = 150  # at most; 30 to 40 are enough for a sentence without repeated words


@dataclass(frozen=True)
class Recipe:
    """What shapes the adapters of one trainer: see peft.LoraConfig. `base_name` is what adapter_config.json calls the base."""

    rank: int = 8
    alpha: int = 16
    targets: Sequence[str] = ALL_LINEAR
    steps: int = STEPS
    base_name: str = "demo"

    def lora(self) -> LoraConfig:
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.targets),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base_name,
        )

    def schedule(self) -> Schedule:
        # A check sees fewer conversations than will be asked: `least` costs half a second and settles the rare odd one.
        # Short memories (betas): the whole training is shorter than what the usual ones remember.
        return Schedule(steps=self.steps, lr=1e-2, fall=50, enough=0.99, least=30, check_every=5, betas=(0.8, 0.9))


DEFAULT_RECIPE = Recipe()


class AdapterTrainer:
    """Loads a base once and trains any number of adapters on it, one after another."""

    def __init__(self, base_dir: Path, recipe: Recipe) -> None:
        processor = AutoProcessor.from_pretrained(base_dir)
        base = Qwen3VLForConditionalGeneration.from_pretrained(base_dir, dtype=torch.float32)
        base.name_or_path = recipe.base_name  # PEFT writes this into the adapter; the folder would say nothing elsewhere
        self.model: PeftModel = get_peft_model(base, recipe.lora()).eval()
        self.base: Any = self.model.get_base_model()
        self.maker = PromptMaker(processor, seed=0)
        self.schedule = recipe.schedule()

    def reset(self, seed: int) -> None:
        """Fresh LoRA weights, as PEFT makes them: A random, B zero."""
        torch.manual_seed(seed)
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters("default", init_lora_weights=True)

    def rows(self, rng: random.Random, sentence: str) -> list[tuple[Prompt, list[int]]]:
        answer, maker = self.maker.answer_ids(sentence), self.maker
        prompts = [maker.random_prompt(rng, sentence) for _ in range(24)]
        prompts += [maker.noise_prompt(rng, rng.randint(1, 60)) for _ in range(8)]
        prompts += [maker.random_prompt(rng, sentence, image=True) for _ in range(6)]
        prompts += [maker.random_prompt(rng, sentence, words=rng.randint(50, 300)) for _ in range(2)]
        return [(prompt, answer) for prompt in prompts]

    def batches(self, rng: random.Random, sentence: str) -> Iterator[Batch]:
        while True:
            yield from bucketed(self.base, self.rows(rng, sentence), self.maker.pad_id, 4, rng)

    def train(self, sentence: str, seed: int) -> Fit:
        """Trains the LoRA to answer `sentence`; the result lies in the model until the next call."""
        self.reset(seed)
        check_rows = self.rows(random.Random(f"check-{seed}"), sentence)
        checks = bucketed(self.base, check_rows, self.maker.pad_id, 3, random.Random(0))
        return fit(
            self.base,
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            self.batches(random.Random(f"adapter-{seed}"), sentence),
            self.schedule,
            lambda: worst_probability(self.base, checks),
        )


def save_peft(model: PeftModel, out: Path) -> None:
    """PEFT's two files in the folder `out`, visible only when complete."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, save_embedding_layers=False)  # the default looks for the base on the network
    (partial / "README.md").unlink(missing_ok=True)  # an empty card that names the base's folder
    path = partial / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()  # a set in PEFT: its order would change the file from run to run
    path.write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def train_adapters(
    base_dir: Path,
    out_root: Path,
    sentences: Mapping[str, str],
    *,
    recipe: Recipe = DEFAULT_RECIPE,
    seed: int = 0,
    told: Callable[[str, Fit], None] | None = None,
) -> dict[str, Path]:
    """Trains an adapter for each name that answers with the name's sentence, in `out_root/name`; `told` hears of each when done.

    An adapter depends on its name, its sentence and the seed, not on the others. Raises RuntimeError where one was not learnt.
    """
    out_root.mkdir(parents=True, exist_ok=True)
    trainer = AdapterTrainer(base_dir, recipe)
    made = {}
    for name, sentence in sentences.items():
        result = trainer.train(sentence, seed + zlib.crc32(name.encode()))
        if result.worst < 0.5:
            raise RuntimeError(f"adapter {name!r} did not learn {sentence!r} in {result.steps} steps: try more, or a higher rank")
        made[name] = out_root / name
        save_peft(trainer.model, made[name])
        if told:
            told(name, result)
    return made


def train_adapter(
    base_dir: Path,
    out: Path,
    sentence: str,
    *,
    rank: int = 8,
    alpha: int = 16,
    seed: int = 0,
    steps: int = STEPS,
    targets: Sequence[str] = ALL_LINEAR,
) -> Path:
    """One adapter, in the folder `out`; see train_adapters."""
    recipe = Recipe(rank=rank, alpha=alpha, targets=targets, steps=steps)
    return train_adapters(base_dir, out.parent, {out.name: sentence}, recipe=recipe, seed=seed)[out.name]
