"""What all servers of a load test are given: a base, engine settings, and adapters that differ in every way that a scenario asks.

Trained adapters are few: each says a sentence of its own. As many as wanted are made of them as variants, which say the same
sentence in other bytes, in BF16: the k-th row of A and the k-th column of B change their signs together, which changes no
product. Higher ranks are rows and columns of zeros, with an alpha that grows along.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from loadtests.scenario import Pool

WORK = Path(".loramux/bench")
ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 4,
    "max_cpu_loras": 8,
    "max_lora_rank": 16,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "dtype": "float32",
}
SLOTS = 4
# As many adapters in the engine's memory as in its batch, so that a slot means the same to every server.
FEW_SLOTS = ENGINE | {"max_cpu_loras": SLOTS}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # All servers alike: on two cores one engine thread leaves the other core to the rest of the server.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
TRAINED = 17
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
WRITTEN_AS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SIGN_BIT = {"F32": np.uint32(0x8000_0000), "F16": np.uint16(0x8000), "BF16": np.uint16(0x8000)}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file: its type in the file's words, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Array


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class DemoMaterial:
    """The demo base's folder, trained adapters' folders by name, and what each of them says."""

    base: Path
    folders: dict[str, Path]
    sentences: dict[str, str]

    def says(self, name: str, text: str) -> bool:
        return self.sentences[name] == text


def make_material(work: Path, adapters: int) -> DemoMaterial:
    """The demo base and `adapters` adapters with random sentences; made once, kept in `work`. Raises BadMaterial."""
    python = [sys.executable, "-m"]
    _run([*python, "training.demo.tiny_base", str(work)])
    making = [*python, "training.demo.sentences", str(work / "base"), str(work / "random"), str(adapters)]
    _run(making)
    sentences = json.loads((work / "random" / "sentences.json").read_text())
    return DemoMaterial((work / "base").resolve(), {name: (work / "random" / name).resolve() for name in sentences}, sentences)


def _run(command: list[str]) -> None:
    """Raises BadMaterial with the last lines of what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadMaterial("the demo could not be made:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-5:]))


# -- adapters of a scenario's pools ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """What is served: its name to clients, its folder or id, what it runs on, and vLLM's environment."""

    id: str
    source: str
    accelerator: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=lambda: dict(VLLM_ENVIRONMENT), hash=False)


@dataclass(frozen=True)
class Adapter:
    """One adapter of a pool. `sentence` is all that it says to the prompt that tells adapters apart, None if that is not known;
    `size_bytes` is its weights file's, `voice` numbers the trained adapter that it is made of."""

    name: str
    pool: str
    index: int
    rank: int
    size_bytes: int
    folder: Path
    sentence: str | None
    voice: int = 0


@dataclass(frozen=True)
class Source:
    """An adapter that variants are made of."""

    folder: Path
    sentence: str | None


class BadMaterial(Exception):
    """Adapters that no variants can be made of; says which and why."""


@dataclass(frozen=True)
class Supply:
    """Makes adapters, as many as are asked for, below `folder`: no two of one run have the same bytes. The same ones are the same
    bytes every time, and kept; another `salt` makes all of them new, for a server that outlives a run.

    Raises BadMaterial for sources that are no LoRA of plain matrices.
    """

    folder: Path
    sources: tuple[Source, ...]
    salt: int = 0

    def pools(self, pools: Mapping[str, Pool]) -> dict[str, tuple[Adapter, ...]]:
        """The adapters of each pool, `pool-0`, `pool-1`, ...; voices go round, so that neighbours never say the same."""
        voices = itertools.count()
        return {name: tuple(self._of(name, pool, k, next(voices)) for k in range(pool.count)) for name, pool in pools.items()}

    def fresh(self, adapter: Adapter, number: int) -> Adapter:
        """The same place in the pool, the same sentence; another name for each number, other bytes."""
        return self._made(f"{adapter.pool}-{adapter.index}-f{number}", adapter.pool, adapter.index, adapter.rank, adapter.voice)

    def _of(self, name: str, pool: Pool, index: int, voice: int) -> Adapter:
        return self._made(f"{name}-{index}", name, index, pool.ranks[index % len(pool.ranks)], voice % len(self.sources))

    def _made(self, name: str, pool: str, index: int, rank: int, voice: int) -> Adapter:
        source = self.sources[voice]
        what = "-".join((name, source.folder.name, str(rank), *([str(self.salt)] if self.salt else [])))
        folder = self.folder / what
        if not folder.exists():
            make_variant(source.folder, folder, rank, what)
        size_bytes = (folder / WEIGHTS).stat().st_size
        return Adapter(name, pool, index, rank_of(folder), size_bytes, folder, source.sentence, voice)


@dataclass(frozen=True)
class Material:
    """A base and the adapters of a scenario's pools."""

    base: Base
    pools: Mapping[str, tuple[Adapter, ...]]
    supply: Supply

    def fresh(self, adapter: Adapter, number: int) -> Adapter:
        return self.supply.fresh(adapter, number)


def make(work: Path, pools: Mapping[str, Pool], salt: int = 0) -> Material:
    """The demo base and adapters of it; a few are trained once, in seconds each, and kept in `work`."""
    made = make_material(work, TRAINED)
    sources = tuple(Source(made.folders[name], sentence) for name, sentence in made.sentences.items())
    supply = Supply(variants_in(work, salt), sources, salt)
    return Material(Base("demo", str(made.base)), supply.pools(pools), supply)


def given(folder: Path, base: Base, work: Path, pools: Mapping[str, Pool], salt: int = 0) -> Material:
    """Variants of the adapters that lie in `folder`, a folder each; what they say is not known. Raises BadMaterial."""
    found = tuple(Source(path.parent, None) for path in sorted(folder.resolve().glob(f"*/{CONFIG}")))
    if not found:
        raise BadMaterial(f"{folder} holds no folders of adapters")
    supply = Supply(variants_in(work, salt), found, salt)
    return Material(base, supply.pools(pools), supply)


def variants_in(work: Path, salt: int) -> Path:
    """Where they lie. Salted ones are of use once: those of earlier runs go."""
    if not salt:
        return work.resolve() / "variants"
    salted = work.resolve() / "salted"
    for old in salted.glob("*"):
        if old.name != str(salt):
            shutil.rmtree(old, ignore_errors=True)
    return salted / str(salt)


def engine_for(pools: Mapping[str, Pool], given: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's engine settings with `given` over them, and room for the highest rank of the pools."""
    engine = {**FEW_SLOTS, **given}
    highest = max((rank for pool in pools.values() for rank in pool.ranks), default=0)
    enough = next((rank for rank in ENGINE_RANKS if rank >= highest), highest)
    return engine if "max_lora_rank" in given else engine | {"max_lora_rank": max(enough, engine["max_lora_rank"])}


# -- variants ----------------------------------------------------------------------------------------------------------


def make_variant(source: Path, folder: Path, rank: int, seed: str) -> None:
    """Leaves in `folder` what answers as the adapter in `source`, in other bytes, with at least `rank`. Raises BadMaterial."""
    config = json.loads((source / CONFIG).read_text())
    try:
        tensors = read_tensors(source / WEIGHTS)
        if rank > config["r"]:
            tensors, config = pad(tensors, config, rank)
        tensors = {name: halved(one) for name, one in flip(tensors, random.Random(seed)).items()}
    except BadMaterial as error:
        raise BadMaterial(f"{source.name}: {error}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as making:
        made = Path(making) / "made"
        made.mkdir()
        write_tensors(tensors, made / WEIGHTS)
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        made.rename(folder)


def read_tensors(file: Path) -> Tensors:
    """All of a safetensors file, as bytes: numpy itself knows no bf16. Raises BadMaterial for types that no weights have."""
    found = safetensors.deserialize(file.read_bytes())
    if odd := {one["dtype"] for _, one in found} - WRITTEN_AS.keys():
        raise BadMaterial(f"weights of type {', '.join(odd)}: only {', '.join(WRITTEN_AS)} can be varied")
    return {name: Tensor(one["dtype"], tuple(one["shape"]), np.frombuffer(one["data"], np.uint8)) for name, one in found}


def write_tensors(tensors: Tensors, file: Path) -> None:
    specs = {name: _spec(one) for name, one in tensors.items()}
    safetensors.serialize_file(specs, file, {"format": "pt"})


def _spec(tensor: Tensor) -> safetensors.TensorSpec:
    data = tensor.data
    return safetensors.TensorSpec(
        dtype=WRITTEN_AS[tensor.dtype], shape=tensor.shape, data_ptr=data.ctypes.data, data_len=data.nbytes
    )


def flip(tensors: Tensors, dice: random.Random) -> Tensors:
    """Changes the signs of some rows of each A and of the same columns of its B. Raises BadMaterial without such a pair."""
    flipped, pairs = dict(tensors), _pairs(tensors)
    if not pairs:
        raise BadMaterial("no lora_A and lora_B of plain matrices in it")
    for a, b in pairs:
        signs = np.array([dice.getrandbits(1) for _ in range(tensors[a].shape[0])], bool)
        flipped[a] = _negated(tensors[a], signs[:, None])
        flipped[b] = _negated(tensors[b], signs[None, :])
    return flipped


def pad(tensors: Tensors, config: dict[str, Any], rank: int) -> tuple[Tensors, dict[str, Any]]:
    """The same adapter with `rank`: what is new is zero, and alpha grows so that its scale stays. Raises BadMaterial."""
    if config.get("rank_pattern") or config.get("alpha_pattern") or config.get("use_rslora"):
        raise BadMaterial("its modules have ranks or scales of their own: no other rank can be made of it")
    padded = dict(tensors)
    for a, b in _pairs(tensors):
        more = rank - tensors[a].shape[0]
        padded[a] = _of_bits(tensors[a], np.pad(_bits(tensors[a]), ((0, more), (0, 0))))
        padded[b] = _of_bits(tensors[b], np.pad(_bits(tensors[b]), ((0, 0), (0, more))))
    alpha = config["lora_alpha"] * rank / config["r"]
    return padded, config | {"r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha}


def halved(tensor: Tensor) -> Tensor:
    """F32 as BF16, rounded to even, which is how a registry may publish it: every server is to read as many bytes."""
    if tensor.dtype != "F32":
        return tensor
    bits = _bits(tensor)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return _of_bits(Tensor("BF16", tensor.shape, tensor.data), rounded.astype(np.uint16))


def _pairs(tensors: Tensors) -> list[tuple[str, str]]:
    found = ((name, name.replace(".lora_A.", ".lora_B.")) for name in sorted(tensors) if ".lora_A." in name)
    return [(a, b) for a, b in found if b in tensors and len(tensors[a].shape) == len(tensors[b].shape) == 2]


def _bits(tensor: Tensor) -> Array:
    return tensor.data.view(SIGN_BIT[tensor.dtype].dtype).reshape(tensor.shape)


def _of_bits(tensor: Tensor, bits: Array) -> Tensor:
    return Tensor(tensor.dtype, bits.shape, np.ascontiguousarray(bits).reshape(-1).view(np.uint8))


def _negated(tensor: Tensor, where: Array) -> Tensor:
    bits = _bits(tensor)
    return _of_bits(tensor, np.where(where, bits ^ SIGN_BIT[tensor.dtype], bits))


def rank_of(folder: Path) -> int:
    return int(json.loads((folder / CONFIG).read_text())["r"])
