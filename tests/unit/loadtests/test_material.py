"""Variants of adapters: the same product of A and B in other bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loadtests.material import (
    CONFIG,
    ENGINE,
    WEIGHTS,
    Adapter,
    BadMaterial,
    Base,
    Source,
    Supply,
    engine_for,
    given,
    read_tensors,
)
from loadtests.scenario import Pool

RANK = 32
A, B = "layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight"


def write_adapter(folder: Path, seed: int = 0, dtype: type = np.float32, **config: object) -> Path:
    dice = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors = {A: dice.normal(size=(RANK, 6)).astype(dtype), B: dice.normal(size=(5, RANK)).astype(dtype)}
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"r": RANK, "lora_alpha": 8, **config}))
    return folder


def numbers(folder: Path, name: str) -> np.ndarray:
    """A tensor in BF16 as float32, exactly."""
    tensor = read_tensors(folder / WEIGHTS)[name]
    assert tensor.dtype == "BF16"
    return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


def change(folder: Path) -> np.ndarray:
    """What the adapter adds to the base."""
    config = json.loads((folder / CONFIG).read_text())
    return config["lora_alpha"] / config["r"] * (numbers(folder, B) @ numbers(folder, A))


@pytest.fixture
def supply(tmp_path: Path) -> Supply:
    sources = tuple(Source(write_adapter(tmp_path / f"s{k}", k), f"sentence {k}") for k in range(3))
    return Supply(tmp_path / "variants", sources)


def pool_of(supply: Supply, count: int = 3, ranks: tuple[int, ...] = (RANK,)) -> tuple[Adapter, ...]:
    return supply.pools({"cold": Pool(count=count, ranks=ranks)})["cold"]


def contents(*adapters: Adapter) -> set[bytes]:
    return {(adapter.folder / WEIGHTS).read_bytes() for adapter in adapters}


def test_a_variant_adds_what_its_source_adds(supply: Supply):
    one, _, _, again = pool_of(supply, 4)
    fresh = supply.fresh(one, 1)
    assert one.sentence == again.sentence == fresh.sentence
    assert np.array_equal(change(one.folder), change(again.folder))
    assert np.array_equal(change(one.folder), change(fresh.folder))


def test_no_two_adapters_have_the_same_bytes(supply: Supply):
    adapters = pool_of(supply, 9)
    assert len(contents(*adapters, *(supply.fresh(adapter, number) for adapter in adapters for number in (1, 2)))) == 27


def test_adapters_beside_each_other_say_different_sentences_across_pools(supply: Supply):
    pools = supply.pools({"one": Pool(count=2), "two": Pool(count=1)})
    assert len({adapter.sentence for pool in pools.values() for adapter in pool}) == 3


def test_a_fresh_one_has_its_place_and_a_name_of_its_own(supply: Supply):
    one = pool_of(supply)[1]
    fresh = supply.fresh(one, 2)
    assert (fresh.pool, fresh.index, fresh.rank) == (one.pool, one.index, one.rank)
    assert len({one.name, fresh.name, supply.fresh(one, 1).name}) == 3


def test_what_was_made_before_is_found_again(supply: Supply):
    first = pool_of(supply)
    assert pool_of(Supply(supply.folder, supply.sources)) == first


def test_a_salt_makes_all_of_them_new(supply: Supply):
    salted = Supply(supply.folder, supply.sources, salt=7)
    assert not contents(*pool_of(supply)) & contents(*pool_of(salted))


def test_a_higher_rank_is_larger_and_adds_the_same(supply: Supply):
    low, high = pool_of(supply, 4, ranks=(RANK, RANK, RANK, 64))[0::3]
    assert (low.rank, high.rank) == (RANK, 64)
    assert numbers(high.folder, A).shape == (64, 6)
    assert high.size_bytes > low.size_bytes
    assert change(high.folder) == pytest.approx(change(low.folder), rel=1e-4)


def test_a_lower_rank_than_the_source_has_is_not_made(supply: Supply):
    assert [adapter.rank for adapter in pool_of(supply, ranks=(1,))] == [RANK] * 3


def test_weights_are_halved_as_a_registry_may_publish_them(supply: Supply):
    source = read_tensors(supply.sources[0].folder / WEIGHTS)[A]
    halved = np.abs(numbers(pool_of(supply)[0].folder, A))
    assert halved == pytest.approx(np.abs(source.data.view(np.float32).reshape(source.shape)), rel=2**-8)


def test_half_precision_stays_as_it_is(tmp_path: Path):
    supply = Supply(tmp_path / "variants", (Source(write_adapter(tmp_path / "half", dtype=np.float16), None),))
    assert read_tensors(pool_of(supply)[0].folder / WEIGHTS)[A].dtype == "F16"


def test_ranks_of_modules_can_not_be_raised(tmp_path: Path):
    supply = Supply(tmp_path / "variants", (Source(write_adapter(tmp_path / "odd", rank_pattern={"q_proj": 2}), None),))
    with pytest.raises(BadMaterial, match="odd: its modules have ranks"):
        pool_of(supply, ranks=(64,))


def test_a_folder_without_lora_is_refused(tmp_path: Path):
    folder = write_adapter(tmp_path / "no-lora")
    save_file({"weight": np.zeros(3, np.float32)}, folder / WEIGHTS)
    with pytest.raises(BadMaterial, match="no lora_A and lora_B"):
        pool_of(Supply(tmp_path / "variants", (Source(folder, None),)))


def test_given_adapters_say_what_nobody_knows(tmp_path: Path):
    for name in ("b", "a"):
        write_adapter(tmp_path / "given" / name)
    material = given(tmp_path / "given", Base("big", "big"), tmp_path, {"cold": Pool(count=3)})
    assert [adapter.sentence for adapter in material.pools["cold"]] == [None] * 3
    assert material.fresh(material.pools["cold"][0], 1).name == "cold-0-f1"


def test_salted_variants_of_earlier_runs_go(tmp_path: Path):
    write_adapter(tmp_path / "given" / "a")
    first, second = (given(tmp_path / "given", Base("big", "big"), tmp_path, {"cold": Pool(count=1)}, salt) for salt in (1, 2))
    assert not first.pools["cold"][0].folder.exists()
    assert second.pools["cold"][0].folder.exists()


def test_a_folder_of_no_adapters_is_refused(tmp_path: Path):
    with pytest.raises(BadMaterial, match="no folders of adapters"):
        given(tmp_path, Base("big", "big"), tmp_path, {})


class TestEngine:
    def test_it_takes_the_highest_rank_of_the_pools(self):
        assert engine_for({"a": Pool(count=1, ranks=(8, 48)), "b": Pool(count=1)}, {})["max_lora_rank"] == 64

    def test_it_is_never_less_than_the_harness_has(self):
        assert engine_for({}, {})["max_lora_rank"] == ENGINE["max_lora_rank"]

    def test_a_scenario_may_say_otherwise(self):
        engine = engine_for({"a": Pool(count=1, ranks=(64,))}, {"max_lora_rank": 128, "max_loras": 2})
        assert (engine["max_lora_rank"], engine["max_loras"]) == (128, 2)
