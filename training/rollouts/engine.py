"""vLLM in this process, one adapter at a time (0.29). Imports it: only an engine's own process may import this module."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm
from PIL import Image
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from training.maze import Episode, picture
from training.rollouts.errors import BadAdapter
from training.rollouts.playing import Prompt, Reply
from training.rollouts.settings import EngineSettings
from training.trajectory import Sampling

FILES = ("adapter_config.json", "adapter_model.safetensors")


class VllmEngine:
    """Answers prompts with the base, or with the adapter that it was last told to use."""

    def __init__(self, settings: EngineSettings) -> None:
        if settings.device == "cpu":
            from training.rollouts.on_cpu import mend

            mend()
        self._can_sleep = settings.can_sleep
        self._llm = vllm.LLM(**settings.arguments)
        config = self._llm.llm_engine.vllm_config
        cached_tokens = (config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size
        self.max_model_len = config.model_config.max_model_len
        longest = min(settings.rules.max_input_length, self.max_model_len)
        self.room = max(1, min(config.scheduler_config.max_num_seqs, cached_tokens // longest))
        self._never = _of_pictures(config.model_config.hf_config)
        self._adapter: LoRARequest | None = None
        self._ids = 0
        self._images: dict[str, Image.Image] = {}
        self.seconds = 0.0

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def use_adapter(self, folder: Path, policy_step: int) -> None:
        """Every adapter gets an id and a name of its own, so that nothing that an earlier one left can be taken for it. Raises
        BadAdapter; the base answers then."""
        self.use_base()
        _look_at(folder)
        self._ids += 1
        adapter = LoRARequest(f"step-{policy_step}-{self._ids}", self._ids, str(folder))
        try:
            self._llm.llm_engine.add_lora(adapter)
        except (ValueError, RuntimeError, OSError) as error:
            raise BadAdapter(f"the engine refuses {folder}: {error}") from error
        if (held := self._llm.llm_engine.list_loras()) != {self._ids}:
            raise BadAdapter(f"the engine holds the adapters {sorted(held)} after it was given {self._ids}, {folder}")
        self._adapter = adapter

    def use_base(self) -> None:
        if self._adapter is not None:
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    def forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine can't forget: requests are still running")
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        self._images.clear()

    def reply(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        began = time.monotonic()
        outputs = self._llm.generate(
            [self._prompt(prompt) for prompt in prompts],
            [self._params(prompt.dice, sampling) for prompt in prompts],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        self.seconds += time.monotonic() - began
        return [_reply(output) for output in outputs]

    def sleep(self) -> None:
        if self._can_sleep:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        if self._can_sleep:
            self._llm.wake_up()

    def _prompt(self, prompt: Prompt) -> Any:
        made: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if prompt.pictured:
            names = [look(state) for state in prompt.pictured]
            made["multi_modal_data"] = {
                "image": [self._image(name, state) for name, state in zip(names, prompt.pictured, strict=True)]
            }
            made["multi_modal_uuids"] = {"image": names}
        return made

    def _image(self, name: str, state: Episode) -> Image.Image:
        if name not in self._images:
            self._images[name] = Image.fromarray(picture(state))
        return self._images[name]

    def _params(self, dice: int, sampling: Sampling) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_generate_length,
            seed=dice,
            logprobs=0,
            logit_bias=self._never,
        )


def look(state: Episode) -> str:
    """A name of the state's picture: equal names are equal pictures."""
    spec, maze = state.spec, state.maze
    return f"{spec.cell_px} {''.join(maze.rows)} {maze.goal} {state.position} {state.left_goal}"


def _of_pictures(hf_config: Any) -> dict[int, float] | None:
    """Tokens that stand for pictures are never sampled: in the next prompt one would be taken for a picture that is not there."""
    named = (getattr(hf_config, f"{kind}_token_id", None) for kind in ("image", "video"))
    return {token: float("-inf") for token in named if token is not None} or None


def _reply(output: Any) -> Reply:
    sampled = output.outputs[0]
    log_probs = tuple(of[token].logprob for of, token in zip(sampled.logprobs, sampled.token_ids, strict=True))
    return Reply(len(output.prompt_token_ids), tuple(sampled.token_ids), log_probs, sampled.text)


def _look_at(folder: Path) -> None:
    for name in FILES:
        if not (folder / name).is_file():
            raise BadAdapter(f"{folder} has no {name}")
    try:
        json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadAdapter(f"{folder / FILES[0]} is no JSON: {error}") from error
