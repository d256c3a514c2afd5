"""The policy: a base from a folder, frozen, with a LoRA on its language modules; and the tower that sees for it, if any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures, Qwen3VLModel

from training.learner.pictures import Eye, Seen, looks
from training.learner.rows import MicroBatch
from training.maze import Episode
from training.spec import VISION_MODULES, Lora

# Of PEFT's inits, those that leave the base as it is: what serves the adapter is the unchanged base.
INITS: dict[str, bool | str] = {"kaiming": True, "gaussian": "gaussian", "orthogonal": "orthogonal"}

NO_CHANCE = -1e9  # its exponential is zero; infinity times that zero would be no number


class BadPolicy(ValueError):
    """A base or a LoRA that no policy can be made of; names the setting, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Precision:
    """`base` is the dtype of the frozen weights; `autocast` has matrix products in bfloat16. LoRA weights are float32 always."""

    base: torch.dtype = torch.float32
    autocast: bool = False

    @staticmethod
    def of(dtype: str, device: str, bf16: bool) -> Precision:
        """Of `loramux.dtype` and `trainer.bf16`: `auto` is float32 on CPUs, where bfloat16 would hardly be faster."""
        is_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and device == "cuda" and bf16)
        return Precision(torch.bfloat16, autocast=True) if is_bfloat16 else Precision()


class Policy(nn.Module):
    """Log-probabilities of sampled tokens. The tower is not part of it: what it sees comes with the micro-batch."""

    def __init__(self, adapted: PeftModel, precision: Precision, pad_id: int) -> None:
        super().__init__()
        self.adapted, self.precision, self.pad_id = adapted, precision, pad_id
        self.register_buffer("unsampled", torch.tensor(_of_pictures(self.base.config), dtype=torch.long), persistent=False)

    @property
    def base(self) -> Any:
        return self.adapted.get_base_model()

    @property
    def layers(self) -> nn.ModuleList:
        inner = self.base.model
        return (inner.language_model if isinstance(inner, Qwen3VLModel) else inner).layers

    @property
    def image_token_id(self) -> int | None:
        return getattr(self.base.config, "image_token_id", None)

    def trained(self) -> dict[str, nn.Parameter]:
        """The LoRA's weights by name, in one order everywhere."""
        return {name: weight for name, weight in self.adapted.named_parameters() if weight.requires_grad}

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The base without its adapter, in eval mode and without gradients."""
        with self.adapted.disable_adapter(), torch.no_grad():
            yield

    def forward(
        self, micro: MicroBatch, seen: Mapping[Episode, Seen], temperature: float, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(log-probs [B, T], entropy [B, T]) of sampled tokens at `temperature`, in nats, float32; zero where the mask is. The
        head is applied at those places only. Tokens that stand for pictures have no share, since no sampler ever gives them."""
        with self._autocast(micro.input_ids_bl.device):
            hidden_blh = self._hidden(micro, seen)
            logits_mv = self.base.get_output_embeddings()(hidden_blh.flatten(0, 1)[micro.before])
        logits_mv = (logits_mv.float() / temperature).index_fill(-1, self.unsampled, NO_CHANCE)
        total_m = logits_mv.logsumexp(-1)
        log_probs_m = logits_mv.gather(-1, micro.targets.unsqueeze(-1)).squeeze(-1) - total_m
        with nullcontext() if entropy_grad else torch.no_grad():
            entropy_m = total_m - (logits_mv.softmax(-1) * logits_mv).sum(-1)
        return _placed(log_probs_m, micro.mask_bt), _placed(entropy_m, micro.mask_bt)

    def _hidden(self, micro: MicroBatch, seen: Mapping[Episode, Seen]) -> Tensor:
        inner = self.base.model
        if not isinstance(inner, Qwen3VLModel):
            positions_bl = micro.positions_3bl[0]
            return inner(input_ids=micro.input_ids_bl, position_ids=positions_bl, use_cache=False).last_hidden_state
        pictures = [seen[looks(state)] for state in micro.pictured]
        return inner(
            input_ids=micro.input_ids_bl,
            position_ids=micro.positions_3bl,
            mm_encoder_outputs={"image": as_encoded(pictures)} if pictures else None,
            use_cache=False,
        ).last_hidden_state

    def _autocast(self, device: torch.device) -> Any:
        return torch.autocast(device.type, torch.bfloat16) if self.precision.autocast else nullcontext()


def _placed(values_m: Tensor, mask_bt: Tensor) -> Tensor:
    return torch.zeros_like(mask_bt).masked_scatter(mask_bt.bool(), values_m)


def as_encoded(pictures: Sequence[Seen]) -> BaseModelOutputWithDeepstackFeatures:
    layers = range(len(pictures[0].deepstack_dnh))
    return BaseModelOutputWithDeepstackFeatures(
        pooler_output=tuple(picture.embeds_nh for picture in pictures),
        deepstack_features=[tuple(picture.deepstack_dnh[layer] for picture in pictures) for layer in layers],
    )


def load_policy(
    base: Path, lora: Lora, precision: Precision, device: torch.device, *, seed: int, gradient_checkpointing: bool = False
) -> tuple[Policy, Eye | None]:
    """The policy and its eye (None for a base of text). The LoRA's start depends on the seed alone, on whichever device. Raises
    BadPolicy."""
    _refuse_deaf_transformers()
    config = AutoConfig.from_pretrained(base)
    model = _load_base(base, config, precision)
    adapted = _adapt(model, lora, seed)
    _refuse_odd_targets(adapted, lora)
    tower = _taken_tower(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(adapted, precision, _pad_id(config)).to(device)
    if tower is None:
        return policy, None
    return policy, Eye(tower.to(device).eval(), AutoImageProcessor.from_pretrained(base), device)


def _refuse_deaf_transformers() -> None:
    """A release that does not know the argument takes it without a word, and the policy would be blind."""
    if "mm_encoder_outputs" not in signature(Qwen3VLModel.forward).parameters:
        raise BadPolicy(f"transformers {transformers.__version__} takes no features of a tower: 5.24.0, which is locked, does")


def _load_base(base: Path, config: Any, precision: Precision) -> Any:
    sees = getattr(config, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_pretrained(base, dtype=precision.base, attn_implementation="sdpa")
    if sees and not isinstance(model.model, Qwen3VLModel):
        raise BadPolicy(f"trainer.policy.model.path is {base}, a {config.model_type}: of bases that see, only qwen3_vl is known")
    return model.requires_grad_(False)


def _adapt(model: Any, lora: Lora, seed: int) -> PeftModel:
    if lora.init_method not in INITS:
        known = ", ".join(INITS)
        raise BadPolicy(f"trainer.policy.model.lora.init_method is {lora.init_method!r}: one that keeps the base, of {known}")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        init_lora_weights=INITS[lora.init_method],
    )
    torch.manual_seed(seed)
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise BadPolicy(f"trainer.policy.model.lora.target_modules is {lora.target_modules!r}: {error}") from error


def _refuse_odd_targets(adapted: PeftModel, lora: Lora) -> None:
    """The tower's features are computed once per update, and what serves the adapter may not apply it there."""
    of_tower = [name for name, module in adapted.named_modules() if isinstance(module, LoraLayer) and ".visual." in name]
    if of_tower:
        raise BadPolicy(
            f"trainer.policy.model.lora.target_modules is {lora.target_modules!r}: that takes in {len(of_tower)} modules of the "
            f"vision tower, which is never trained; set trainer.policy.model.lora.exclude_modules to {VISION_MODULES!r}"
        )


def _taken_tower(model: Any) -> Any | None:
    """The tower, out of the model: it is never sharded, since processes see different numbers of pictures."""
    if not isinstance(model.model, Qwen3VLModel):
        return None
    tower, model.model.visual = model.model.visual, None
    return tower


def _of_pictures(config: Any) -> list[int]:
    named = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video"))
    return [token for token in named if token is not None]


def _pad_id(config: Any) -> int:
    """Any id does, since nothing looks at padding."""
    return getattr(config, "pad_token_id", None) or 0
