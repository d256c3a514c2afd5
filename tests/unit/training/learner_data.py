"""Episodes as rollouts would give them, played by dice instead of a policy, for whoever trains on them in tests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from training.base.untrained import make_untrained
from training.maze import MazeSpec, begin, messages, observe, step
from training.spec import VISION_MODULES, TrainSpec
from training.trajectory import Task, Trajectory

MAZES = MazeSpec(cell_px=16, actions="keyword", max_turns=2)
WORDS = ("up", "down", "left", "right", "stop")


def make_base(out: Path) -> Path:
    return out if out.exists() else make_untrained(out)


def spec_of(base: Path, *overrides: str) -> TrainSpec:
    return TrainSpec.from_values(
        {
            "trainer": {
                "policy": {
                    "model": {"path": str(base), "lora": {"rank": 4, "alpha": 8, "exclude_modules": VISION_MODULES}},
                    "optimizer_config": {"lr": 1e-3},
                },
                "algorithm": {"use_kl_loss": False},
                "policy_mini_batch_size": 2,
                "micro_train_batch_size_per_gpu": 3,
                "gradient_checkpointing": False,
            },
            "loramux": {"device": "cpu"},
        },
        overrides,
    )


def play(
    base: Path, groups: int = 4, samples: int = 2, *, policy_step: int = 0, mazes: MazeSpec = MAZES, seed: int = 0
) -> list[Trajectory]:
    """`groups` mazes, `samples` episodes of each, of which every other is rewarded, whatever it did."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rng = random.Random(seed)
    played = []
    for maze in range(groups):
        for sample in range(samples):
            episode = _episode(tokenizer, Task(seed * 1000 + maze, sample), mazes, rng)
            played.append(replace(episode, policy_step=policy_step, reward=float(sample % 2 == 0)))
    return played


def _episode(tokenizer: Any, task: Task, mazes: MazeSpec, rng: random.Random) -> Trajectory:
    state = begin(mazes, task.maze_seed)
    prompt = _ids(tokenizer, messages(state))
    ids, mask, pictured, replies, outcomes = list(prompt), [], [state], [], []
    while True:
        reply = f"<action>{rng.choice(WORDS)}</action>"
        sampled = tokenizer.encode(reply + "<|im_end|>")
        turn = step(state, reply)
        state = turn.episode
        replies.append(reply)
        outcomes.append(turn.outcome)
        between = [] if state.done else _ids(tokenizer, observe(turn), after="\n")
        ids += sampled + between
        mask += [1] * len(sampled) + [0] * len(between)
        if state.done:
            break
        pictured.append(state)
    if mazes.observation == "text":
        pictured = []
    return Trajectory(
        task=task,
        policy_step=0,
        token_ids=tuple(ids),
        prompt_tokens=len(prompt),
        loss_mask=tuple(mask),
        log_probs=tuple(-rng.random() if sampled else 0.0 for sampled in mask),
        pictured=tuple(pictured),
        replies=tuple(replies),
        outcomes=tuple(outcomes),
        reward=0.0,
        solved=state.solved,
        stop_reason="done",
    )


def _ids(tokenizer: Any, said: list[dict[str, Any]], after: str = "") -> list[int]:
    return tokenizer.encode(after + tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
