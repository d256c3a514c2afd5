"""An adapter that walks, and what the trainer's own engine plays with it; in a process that may import torch.

`python -m tests.maze_walker make BASE ADAPTER` makes an untrained maze base and an adapter for it, which goes up and, where a
wall is in the way, left: quickly learnt, and other moves in every maze, which is all that is needed to tell whether two engines
play alike. `... evaluate BASE ADAPTER FILE SEED...` leaves a Played a line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from training.base.architecture import MAZES
from training.base.demonstrations import Demonstration
from training.base.untrained import make_untrained
from training.base.walking import Teller, walking_loss
from training.demo.adapters import save_peft
from training.learner.pictures import Eye
from training.maze import begin, step
from training.maze.actions import as_text
from training.playing.comparing import as_lines
from training.rollouts import Rollouts
from training.runs.from_spec import decodings_of
from training.runs.measures import played
from training.spec import TrainSpec
from training.trajectory import Task

MOST_STEPS, WALKS, TURNS, LR = 120, 6, 3, 5e-3
FIRST_SEED = 77_000
SURE = 0.02  # nats a token
LANGUAGE = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]  # the tower's have other names


def walked(seed: int) -> Demonstration:
    """A few turns of the rule."""
    states, actions, turns = [begin(MAZES, seed)], ["up"], []
    while True:
        turns.append(step(states[-1], as_text(actions[-1], MAZES.actions)))
        if len(actions) == TURNS:
            return Demonstration(tuple(states), tuple(actions), tuple(actions), tuple(turns))
        states.append(turns[-1].episode)
        actions.append("left" if turns[-1].outcome == "bump" else "up")


def make_walker(base_dir: Path, out: Path) -> float:
    """Gives the share of replies that it learnt."""
    processor = AutoProcessor.from_pretrained(base_dir)
    base = Qwen3VLForConditionalGeneration.from_pretrained(base_dir, dtype=torch.float32)
    base.name_or_path = "maze"
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules=LANGUAGE))
    inner = model.get_base_model()
    eye = Eye(inner.model.visual, processor.image_processor, torch.device("cpu"))
    teller = Teller(processor.tokenizer, eye)
    shown = [teller.show(walked(FIRST_SEED + walk)) for walk in range(WALKS)]
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=LR)
    right = 0.0
    for _ in range(MOST_STEPS):
        loss, right = walking_loss(inner, eye, shown, processor.tokenizer.pad_token_id)
        if right == 1.0 and loss < SURE:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_peft(model, out)
    return right


def evaluate(base_dir: Path, adapter: Path, out: Path, seeds: list[int]) -> None:
    spec = TrainSpec.load(
        Path("training/specs/demo.yaml"), [f"trainer.policy.model.path={base_dir}", "trainer.policy.model.lora.rank=16"]
    )
    rollouts = Rollouts(spec)
    try:
        rollouts.use_adapter(adapter, 1)
        greedy = decodings_of(spec)["greedy"]
        trajectories = rollouts.play([Task(seed) for seed in seeds], greedy)
    finally:
        rollouts.close()
    out.write_text(as_lines([played(one, spec.loramux.maze) for one in trajectories]))


if __name__ == "__main__":
    what, base, adapter, *rest = sys.argv[1:]
    if what == "evaluate":
        evaluate(Path(base), Path(adapter), Path(rest[0]), [int(seed) for seed in rest[1:]])
    elif not Path(adapter).exists():
        make_untrained(Path(base))
        print(f"{make_walker(Path(base), Path(adapter)):.2f} of the replies are right")
