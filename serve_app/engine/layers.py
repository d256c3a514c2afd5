"""vLLM's layers by Hugging Face's names (0.29): which modules take LoRA, with which shapes, and which of them an adapter fills.

`serve_app.engine.vllm_engine` says what the file knows and where the other half of that knowledge lies.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from adapters.types import BaseContract, ModuleShape

TEXT_TOWER = "language_model"
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # the two 3-D weights of a layer's experts, as transformers names them

logger = logging.getLogger(__name__)

# Module path to (in_features, out_features, experts); plain values, since they come from the worker's process.
Modules = dict[str, tuple[int, int, int | None]]


def describe_base(base: str, model_config: Any, max_rank: int, modules: Modules) -> BaseContract:
    """The contract of a base with these modules; `model_config` is vLLM's."""
    shapes = {name: ModuleShape(*shape) for name, shape in sorted(modules.items())}
    tower = _tower(shapes)
    return BaseContract(
        base=base,
        fingerprint=_fingerprint(model_config.model),
        modules=shapes,
        max_rank=max_rank,
        tower=tower,
        serves_vision=tower is not None and not all(name.startswith(f"{tower}.") for name in shapes),
        architecture=model_config.architecture,
    )


def lora_modules(manager: Any, hf_config: Any) -> Modules:
    """Each module that takes LoRA in vLLM's LoRA manager, by its Hugging Face path.

    Embeddings and the head are left out: adapters on them are refused. So is a module that no key of an adapter can reach.
    """
    names = Names(manager.model, hf_config)
    parts = {part: shape for name, layer in manager.modules.items() for part, shape in _parts(manager, name, layer).items()}
    return {path: shape for part, shape in parts.items() if (path := names.before(part)) is not None}


def landed_modules(manager: Any, int_id: int) -> list[str]:
    """The modules, by the engine's names, that a registered adapter fills: parts of packed ones and experts one by one."""
    adapter = manager._registered_adapters.cache.get(int_id)  # its own `get` would count as a use
    if adapter is None:
        return []
    return [name for module, layer in manager.modules.items() for name in _filled(manager, adapter, module, layer)]


def misfits(manager: Any, adapter: Any) -> list[str]:
    """What a loaded adapter holds in another shape than the layer takes that it lands on; experts, which vLLM checks, left out.

    vLLM copies a smaller factor into the corner of its place without a word, and the adapter says next to nothing from there.
    """
    takes = {part: shape for name, layer in manager.modules.items() for part, shape in _parts(manager, name, layer).items()}
    found = []
    for part, weights in adapter.loras.items():
        width_in, width_out, experts = takes.get(part, (None, None, None))
        if width_in is None or experts is not None or not hasattr(weights.lora_a, "shape"):
            continue
        has = weights.lora_a.shape[-1], weights.lora_b.shape[0]
        if has != (width_in, width_out):
            found.append(f"{part} is {has[0]} to {has[1]} wide, and the base's {width_in} to {width_out}")
    return found


def modules_of_model(model: Any, vllm_config: Any) -> Modules:
    """What a LoRA manager of vLLM would take in a model that has no weights; runs on the meta device, without kernels."""
    from vllm.lora import model_manager
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.utils import _all_lora_classes

    class Marked(BaseLayerWithLoRA):
        """Stands where vLLM's layer would: kernels and buffers of the real ones need a device."""

        def __init__(self, base_layer: Any) -> None:
            super().__init__()
            self.base_layer = base_layer

        def set_mapping(self, punica_wrapper: Any) -> None: ...

    def mark(layer: Any, max_loras: int, lora_config: Any, packed: list[str], model_config: Any = None) -> Any:
        fits = (
            kind.can_replace_layer(
                source_layer=layer, lora_config=lora_config, packed_modules_list=packed, model_config=model_config
            )
            for kind in _all_lora_classes
        )
        return Marked(layer) if any(fits) else layer

    def mark_head(layer: Any, *args: Any) -> Any:
        return Marked(layer)

    class Planner(model_manager.LoRAModelManager):
        def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
            multimodal = model_manager.supports_multimodal(self.model) and hasattr(self.model, "get_mm_mapping")
            self.supports_mm = multimodal
            prefixes = _lora_prefixes(self.model, self.lora_config) if multimodal else ["language_model"]
            self.punica_wrapper_mapping = dict.fromkeys(prefixes, object())

    kept = model_manager.from_layer, model_manager.from_layer_logits_processor
    model_manager.from_layer, model_manager.from_layer_logits_processor = mark, mark_head
    try:
        config = vllm_config.model_config
        manager = Planner(model, 1, 1, config.get_vocab_size(), vllm_config.lora_config, "meta", vllm_config)
    finally:
        model_manager.from_layer, model_manager.from_layer_logits_processor = kept
    return lora_modules(manager, config.hf_config)


def _lora_prefixes(model: Any, lora_config: Any) -> list[str]:
    """The parts of a vision-language model that take LoRA, by the rules of vLLM's manager."""
    parts = model.get_mm_mapping()
    prefixes = list(parts.language_model)
    if not (lora_config.enable_tower_connector_lora and model.supports_tower_connector_lora):
        return prefixes
    prefixes += parts.tower_model
    if parts.connector and _counts_connector_tokens(model):
        prefixes += parts.connector
    return prefixes


def _counts_connector_tokens(model: Any) -> bool:
    try:
        return model.get_mm_lora_token_counts(modality="image", mm_kwargs=None, num_mm_embeds=1024)[1] is not None
    except NotImplementedError:
        return False


def _parts(manager: Any, name: str, layer: Any) -> Modules:
    """What an adapter may hold for one layer of the engine, by the engine's names."""
    base = layer.base_layer
    if hasattr(base, "moe_config"):
        return _experts(manager, name, base.moe_config)
    if not hasattr(base, "input_size"):
        return {}
    names = manager.packed_modules.get(name, [name])
    widths = _out_features(base, len(names))
    if len(widths) != len(names):
        logger.warning("the parts of %s can't be told apart; adapters on it are refused", name)
        return {}
    return {part: (base.input_size, width, None) for part, width in zip(names, widths, strict=True)}


def _experts(manager: Any, name: str, moe: Any) -> Modules:
    """The linears of a layer's experts: one by one, or two for all of them where the engine wants that form.

    The form with factors shared by all experts (`enable_moe_shared_loras`) is not described: such adapters are refused.
    """
    hidden = moe.hidden_dim_unpadded
    inner = moe.intermediate_size_per_partition_unpadded * moe.moe_parallel_config.tp_size
    if manager._is_3d_moe_model:
        count = moe.num_logical_experts
        return {f"{name}.{GATE_UP}": (hidden, 2 * inner, count), f"{name}.{DOWN}": (inner, hidden, count)}
    if manager._enable_moe_shared_loras:
        return {}
    names = manager.packed_modules[name]
    period = 2 if manager._is_non_gated_moe else 3  # gate, down, up of each expert in turn; or up, down
    return {part: (inner, hidden, None) if place % period == 1 else (hidden, inner, None) for place, part in enumerate(names)}


def _filled(manager: Any, adapter: Any, name: str, layer: Any) -> list[str]:
    if isinstance(layer, _head_layer()):
        return []  # `_leave_the_head_alone`
    weights = manager._get_lora_layer_weights(adapter, name)
    if not weights:
        return []
    if hasattr(layer.base_layer, "moe_config"):  # vLLM takes all experts or fails
        if manager._is_3d_moe_model:
            return [f"{name}.{GATE_UP}", f"{name}.{DOWN}"]
        return manager._restrict_to_local_experts(name, manager.packed_modules[name])
    parts = manager.packed_modules.get(name, [name])
    if len(parts) == 1:
        return parts
    return [part for part, factor in zip(parts, weights.lora_a, strict=True) if factor is not None]


def _head_layer() -> type:
    from vllm.lora.layers import LogitsProcessorWithLoRA

    return LogitsProcessorWithLoRA


def _out_features(linear: Any, parts: int) -> list[int]:
    """The widths of the parts, whole, however many devices share the layer; fewer if it has fewer slices than parts."""
    sizes = _slice_sizes(linear)
    if len(sizes) < parts:
        return sizes
    # Where there are fewer parts than slices, vLLM lets the first part cover what the others leave.
    first = len(sizes) - parts + 1
    return [sum(sizes[:first]), *sizes[first:]]


def _slice_sizes(linear: Any) -> list[int]:
    if hasattr(linear, "total_num_kv_heads"):  # its `output_sizes` count heads twice that several devices share
        q = linear.total_num_heads * linear.head_size
        kv = linear.total_num_kv_heads * linear.head_size
        return [q, kv, linear.total_num_kv_heads * getattr(linear, "v_head_size", linear.head_size)]
    return list(getattr(linear, "output_sizes", None) or [linear.output_size])


class Names:
    """Module names there and back: vLLM renames what it reads of an adapter, and its own names are not Hugging Face's.

    Back, the names of transformers' own model are renamed forward and looked up, so any kind of renaming has its inverse.
    Where these don't lead to a module (transformers lacks the architecture, or lays it out in another way than the
    checkpoints are), renamed prefixes are turned round.
    """

    def __init__(self, model: Any, hf_config: Any) -> None:
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._renames = mapper.get_rename_mapper() if mapper is not None else None
        self._before = {self.after(name): name for name in _huggingface_names(hf_config)}

    def after(self, path: str) -> str:
        """The engine's name for a module's path in an adapter, by vLLM's own reader."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        return parse_fine_tuned_lora_name(f"base_model.model.{path}.lora_A.weight", self._renames)[0]

    def before(self, name: str) -> str | None:
        """A path that `after` turns into `name`, None if there is none."""
        return next((path for path in self._candidates(name) if self.after(path) == name), None)

    def _candidates(self, name: str) -> Iterator[str]:
        known, tail = name, ""
        while known:  # an expert is no module of its own in transformers; its layer is
            if known in self._before:
                yield self._before[known] + tail
            known, dot, last = known.rpartition(".")
            tail = f"{dot}{last}{tail}"
        renamed = self._renames.orig_to_new_prefix.items() if self._renames else ()
        yield from (old + name[len(new) :] for old, new in renamed if name.startswith(new))
        yield name


def _huggingface_names(hf_config: Any) -> list[str]:
    """The module paths of transformers' own model of this architecture; empty if it has none."""
    import torch
    import transformers

    kind = getattr(transformers, next(iter(getattr(hf_config, "architectures", None) or ()), ""), None)
    if kind is None:
        return []
    try:
        with torch.device("meta"):
            model = kind._from_config(copy.deepcopy(hf_config))
    except Exception:  # the engine knows more configurations than transformers does
        logger.warning("transformers can't make %s: renamed prefixes are turned round", kind.__name__, exc_info=True)
        return []
    return [name for name, _ in model.named_modules() if name]


def _tower(modules: Iterable[str]) -> str | None:
    """The prefix of the text layers in a vision-language base, None in a text base."""
    for name in modules:
        before, found, _ = name.partition(f"{TEXT_TOWER}.")
        if found:
            return before + TEXT_TOWER
    return None


def _fingerprint(model: str) -> str:
    """Tells bases apart: SHA-256 over the config and a sample of the weights; over the id alone when it is no local folder."""
    digest = hashlib.sha256()
    folder = Path(model)
    if not (folder / "config.json").is_file():
        return hashlib.sha256(model.encode()).hexdigest()
    config = json.loads((folder / "config.json").read_text())
    volatile = ("transformers_version", "_name_or_path")
    digest.update(json.dumps({k: v for k, v in config.items() if k not in volatile}, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode() + _sample(file))
    return digest.hexdigest()


def _sample(file: Path, sample_bytes: int = 2**20) -> bytes:
    with file.open("rb") as stream:
        start = stream.read(sample_bytes)
        stream.seek(max(0, file.stat().st_size - sample_bytes))
        return start + stream.read(sample_bytes)
