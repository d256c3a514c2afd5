"""Folders of a store become versions: which are found, under which name, when they are taken, and what is remembered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from adapters import errors
from adapters.adoption import Adoption, DropWatcher, adopt, find, source_settings
from adapters.adoption.candidates import Candidate, judged
from adapters.adoption.layouts import Folder, adapter_name, folders_of
from adapters.contract import PublishOptions
from adapters.names import AdapterRef, check_adapter_name
from adapters.registry import Registry, layout
from adapters.registry.collection import plan_for, run
from adapters.registry.retention import RetentionPolicy
from adapters.registry.view import RegistryView
from adapters.settings import DropSettings, RegistrySettings
from adapters.store import Listed
from tests.adapter_folders import TEXT, AdapterFolder, plain, safetensors_bytes
from tests.fake_store import FakeStore

BASE = TEXT.base
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LONG_AGO_S = 10_000.0


def rows(*keys: str, modified_s: float = 0.0) -> list[Listed]:
    return [Listed(key, 10, f'"{key}"', modified_s) for key in keys]


def adapter(*folders: str) -> list[Listed]:
    return rows(*(f"{folder}{name}" for folder in folders for name in (CONFIG, WEIGHTS)))


def found(*keys: Listed, prefix: str = "", default_name: str | None = None) -> list[tuple[str, int | None]]:
    folders = folders_of(keys, prefix, default_name)
    return [(adapter_name(folder.original), folder.step) for folder in folders if not folder.is_inside_another]


class TestLayouts:
    @pytest.mark.parametrize(
        ("folder", "name", "step"),
        [
            ("maze-grpo/", "maze-grpo", None),
            ("team/maze/", "team/maze", None),
            ("r1-train/global_step_160/policy/", "r1-train", 160),
            ("ckpts/sft-grpo/global_step_20/policy/lora_adapter/", "ckpts/sft-grpo", 20),
            ("verl-run/global_step_3/actor/lora_adapter/", "verl-run", 3),
            ("out/checkpoint-500/", "out", 500),
            ("maze/step_7/", "maze", 7),
            ("Maze GRPO (v2)/", "maze-grpo-v2", None),
            ("runs/2026/maze/", "runs/2026-maze", None),
        ],
    )
    def test_name_and_step(self, folder: str, name: str, step: int | None) -> None:
        assert found(*adapter(folder)) == [(name, step)]

    @pytest.mark.parametrize(
        ("prefix", "folder", "name", "step"),
        [
            ("lora-adapters/maze-grpo/", "", "maze-grpo", None),
            ("runs/r1/", "global_step_20/policy/", "r1", 20),
            ("runs/r1/global_step_20/policy/", "", "r1", 20),
            ("", "", "dropped", None),
            ("", "global_step_5/policy/", "dropped", 5),
        ],
    )
    def test_a_folder_that_is_the_prefix_is_called_after_it(self, prefix: str, folder: str, name: str, step: int | None) -> None:
        assert found(*adapter(prefix + folder), prefix=prefix, default_name="dropped") == [(name, step)]

    def test_steps_are_numbers_and_what_has_none_is_last(self) -> None:
        keys = adapter("out/", "out/checkpoint-1000/", "out/checkpoint-90/", "out/checkpoint-500/")
        assert [step for _, step in found(*keys)] == [90, 500, 1000, None]

    def test_a_part_of_an_adapter_is_none_of_its_own(self) -> None:
        keys = adapter("dpo/", "dpo/reference/", "r/global_step_1/policy/", "r/global_step_1/policy/lora_adapter/")
        assert found(*keys) == [("dpo", None), ("r", 1)]

    def test_caches_of_tools_and_other_folders_are_not_seen(self) -> None:
        assert found(*adapter(".cache/huggingface/x/"), *rows("logs/train.txt", "base/model.safetensors")) == []

    def test_half_copied_ones_are_seen(self) -> None:
        keys = rows(f"a/{CONFIG}", f"b/{WEIGHTS}", "c/adapter_model-00001-of-00002.safetensors", "d/adapter_model.bin")
        assert [name for name, _ in found(*keys)] == ["a", "b", "c", "d"]

    @pytest.mark.parametrize(
        "original", ["", "ÄÖ", "versions", "x" * 90, "a/" + "y" * 90 + "/z", "-", "Ünï/CÖDE", "../..", "head.json"]
    )
    def test_every_name_comes_into_the_grammar(self, original: str) -> None:
        assert check_adapter_name(adapter_name(original))

    def test_long_names_stay_apart(self) -> None:
        assert adapter_name("x" * 80 + "1") != adapter_name("x" * 80 + "2")


class TestJudging:
    """Pure: listings in, candidates out."""

    def judge(self, folders: Iterable[Folder], missing: Mapping[str, str] = {}, now_s: float = 100.0) -> dict[str, Candidate]:
        folders = list(folders)
        parts = {(folder.prefix, folder.state): missing.get(folder.prefix) for folder in folders}
        before = {folder.prefix: folder.state for folder in folders}
        return {one.prefix: one for one in judged(folders, parts, before, settle_s=30, now_s=now_s)}

    def test_what_changed_lately_has_not_settled(self) -> None:
        folders = folders_of([*adapter("a/"), *rows(f"b/{CONFIG}", f"b/{WEIGHTS}", modified_s=80)], "")
        judged_now = self.judge(folders)
        assert (judged_now["a/"].is_ready, judged_now["b/"].reason) == (True, "changing")

    def test_what_differs_from_the_last_look_has_not_settled(self) -> None:
        [folder] = folders_of(adapter("a/"), "")
        parts = {(folder.prefix, folder.state): None}
        [candidate] = judged([folder], parts, {"a/": "another"}, settle_s=0, now_s=100)
        assert (candidate.settled, candidate.reason) == (False, "changing")

    def test_a_step_waits_for_earlier_ones_that_are_being_written(self) -> None:
        young = rows(f"r/global_step_1/policy/{CONFIG}", modified_s=99)
        folders = folders_of([*young, *adapter("r/global_step_2/policy/", "other/global_step_2/policy/")], "")
        missing = {"r/global_step_1/policy/": "no_weights"}
        now = self.judge(folders, missing)
        assert now["r/global_step_2/policy/"].reason == "earlier_step_changing"
        assert now["other/global_step_2/policy/"].is_ready
        later = self.judge(folders, missing, now_s=200)
        assert later["r/global_step_2/policy/"].is_ready, "one that was left half copied holds up nobody"

    def test_two_folders_whose_names_come_to_the_same(self) -> None:
        now = self.judge(folders_of(adapter("Maze/", "maze/"), ""))
        assert (now["maze/"].is_ready, now["Maze/"].reason) == (True, "name_taken")


@pytest.fixture
def source() -> FakeStore:
    return FakeStore(clock_s=lambda: LONG_AGO_S)


@pytest.fixture
async def registry() -> Registry:
    registry = Registry(FakeStore())
    await registry.put_base(TEXT)
    return registry


def files_of(made: AdapterFolder, tmp_path: Path) -> dict[str, bytes]:
    folder = made.write(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    return files


async def put(source: FakeStore, prefix: str, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        await source.put(prefix + name, data)


async def reasons(source: FakeStore) -> dict[str, str | None]:
    return {one.prefix: one.reason for one in await find(source, settle_s=0, look_again_s=0)}


class TestCompleteness:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({CONFIG: None}, "no_config"),
            ({WEIGHTS: None}, "no_weights"),
            ({WEIGHTS: -1}, "weights_cut_off"),
            ({WEIGHTS: 6}, "weights_cut_off"),
            ({WEIGHTS: 0}, "weights_cut_off"),
            ({CONFIG: -1}, "config_cut_off"),
            ({CONFIG: 0}, "config_cut_off"),
            ({}, None),
        ],
    )
    async def test_of_the_two_files(self, source: FakeStore, tmp_path: Path, change: dict, reason: str | None) -> None:
        files = files_of(plain(), tmp_path)
        for name, cut in change.items():
            files[name] = files[name][:cut] if cut is not None else b""
        await put(source, "a/", {name: data for name, data in files.items() if change.get(name, 0) is not None})
        assert await reasons(source) == {"a/": reason}
        assert source.count("get", WEIGHTS) == 0, "weights are looked at by their header only"

    async def test_of_shards(self, source: FakeStore, tmp_path: Path) -> None:
        sharded = AdapterFolder(plain().config, plain().tensors, shards=3)
        files = files_of(sharded, tmp_path)
        await put(source, "whole/", files)
        await put(source, "half/", {name: data for name, data in files.items() if "00002" not in name})
        await put(source, "index/", {name: data for name, data in files.items() if "of-0000" not in name})
        index = json.loads(files["adapter_model.safetensors.index.json"])
        index["weight_map"]["more"] = "adapter_model-00004-of-00004.safetensors"
        await put(source, "more/", {**files, "adapter_model.safetensors.index.json": json.dumps(index).encode()})
        assert await reasons(source) == {
            "whole/": None,
            "half/": "missing_shards",
            "index/": "missing_shards",
            "more/": "missing_shards",
        }

    async def test_of_shards_that_kept_the_models_name(self, source: FakeStore, tmp_path: Path) -> None:
        files = files_of(AdapterFolder(plain().config, plain().tensors, shards=2), tmp_path)
        index = "adapter_model.safetensors.index.json"
        renamed = {name if name in (CONFIG, index) else name.removeprefix("adapter_"): data for name, data in files.items()}
        await put(source, "files/", renamed)
        await put(source, "index/", {**files, index: files[index].replace(b"adapter_model-", b"model-")})
        await put(source, "half/", {name: data for name, data in renamed.items() if "00001-of" not in name})
        await put(source, "base/", {"model-00001-of-00001.safetensors": b"x"})
        assert await reasons(source) == {"files/": None, "index/": None, "half/": "missing_shards"}
        done = await adopt(Registry(FakeStore()), source, Adoption(BASE, "maze", "files/"))
        assert done.created

    async def test_of_a_pointer(self, source: FakeStore, tmp_path: Path) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        await put(source, "a/", {**files_of(plain(), tmp_path), WEIGHTS: pointer})
        assert await reasons(source) == {"a/": "not_downloaded"}

    async def test_a_header_longer_than_the_first_read(self, source: FakeStore, tmp_path: Path) -> None:
        many = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{x}.weight": v for n in range(600) for x, v in _pair()}
        await put(source, "a/", files_of(AdapterFolder(plain().config, many), tmp_path))
        assert await reasons(source) == {"a/": None}


def _pair():
    tensors = list(plain().tensors.values())
    return [("A", tensors[0]), ("B", tensors[1])]


class TestAdopting:
    async def test_a_folder_becomes_a_version_with_its_origin(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        files = {**files_of(plain(), tmp_path), "tokenizer.json": b"x" * 3_000_000, "README.md": b"hello", "a b;c": b"?"}
        await put(source, "r1/global_step_20/policy/", files)
        address = "s3://user:secret@bucket/runs?token=secret"
        done = await adopt(
            registry,
            source,
            Adoption(BASE, "maze", "r1/global_step_20/policy", step=20, original="R1", address=address, promote="canary"),
        )
        assert (done.ref, done.created) == (AdapterRef(BASE, "maze", 1), True)
        assert done.manifest.source == {
            "kind": "adopted",
            "address": "s3://bucket/runs",
            "prefix": "r1/global_step_20/policy",
            "original": "R1",
            "step": 20,
        }
        assert (await registry.head(BASE, "maze")).aliases == {"canary": 1}
        assert source.count("get_range", "tokenizer.json") == 0, "large files beside the adapter stay where they are"

    async def test_the_same_content_elsewhere_is_the_same_version(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        files = files_of(plain(), tmp_path)
        for prefix in ("a/", "b/"):
            await put(source, prefix, files)
        first = await adopt(registry, source, Adoption(BASE, "maze", "a/"))
        again = await adopt(registry, source, Adoption(BASE, "maze", "b/"))
        assert (first.created, again.created, again.ref) == (True, False, first.ref)

    async def test_nothing_there(self, registry: Registry, source: FakeStore) -> None:
        await source.put("a/readme.txt", b"x")
        with pytest.raises(errors.ModelNotFound):
            await adopt(registry, source, Adoption(BASE, "maze", "a"))

    async def test_a_folder_that_changes_while_it_is_read(
        self, registry: Registry, source: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await put(source, "a/", files_of(plain(), tmp_path))
        read = source.get_range

        async def read_and_write(key: str, start: int, length: int) -> bytes:
            data = await read(key, start, length)
            await source.put(f"a/{CONFIG}", source.objects[f"a/{CONFIG}"].data)
            return data

        monkeypatch.setattr(FakeStore, "get_range", lambda self, *args: read_and_write(*args))
        with pytest.raises(errors.VersionConflict) as caught:
            await adopt(registry, source, Adoption(BASE, "maze", "a/"))
        assert caught.value.reason == "source_changed"
        assert await registry.versions(BASE, "maze") == []

    async def test_one_over_the_limit_is_not_downloaded(self, registry: Registry, source: FakeStore, tmp_path: Path) -> None:
        await put(source, "a/", files_of(plain(), tmp_path))
        with pytest.raises(errors.AdapterRefused) as caught:
            await adopt(registry, source, Adoption(BASE, "maze", "a/", options=PublishOptions(max_bytes=100)))
        assert caught.value.reason == "too_large" and source.count("get_range") == 0

    async def test_what_the_names_beside_it_say_counts(self, registry: Registry, source: FakeStore, tmp_path: Path) -> None:
        await put(source, "a/", {**files_of(plain(), tmp_path), "vit.safetensors": b"v" * 2_000_000})
        with pytest.raises(errors.AdapterRefused) as caught:
            await adopt(registry, source, Adoption(BASE, "maze", "a/"))
        assert caught.value.reason == "extra_weights"

    async def test_another_tools_weights_are_known_by_their_header(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        foreign = {"lora_unet_x.lora_down.weight": np.zeros((600, 1000), np.float32)}
        data = safetensors_bytes(foreign, dict.fromkeys(foreign, "F32"))
        await put(source, "a/", {CONFIG: files_of(plain(), tmp_path)[CONFIG], "kohya.safetensors": data})
        with pytest.raises(errors.AdapterRefused) as caught:
            await adopt(registry, source, Adoption(BASE, "maze", "a/"))
        assert caught.value.reason == "foreign_format"

    def test_a_source_is_reached_as_the_registry_is(self) -> None:
        registry = RegistrySettings(url="s3://b/registry", endpoint="http://e", access_key_id="k", secret_access_key="s")
        settings = source_settings("s3://other/drop/", registry)
        assert (settings.url, settings.endpoint, settings.access_key_id) == ("s3://other/drop", "http://e", "k")
        for wrong in ("http://x/y", "maze", "s3://user:pw@b/x", "s3://b/x?y=1"):
            with pytest.raises(errors.InvalidRequest):
                source_settings(wrong, registry)

    def test_a_drop_prefix_is_reached_as_it_says_and_else_as_the_registry(self) -> None:
        registry = RegistrySettings(url="s3://b/registry", endpoint="http://e", access_key_id="k", region="eu-west-1")
        settings = DropSettings(url="s3://d/drop", base="b", access_key_id="mine").store_settings(registry)
        assert (settings.url, settings.endpoint, settings.access_key_id, settings.region) == (
            "s3://d/drop",
            "http://e",
            "mine",
            "eu-west-1",
        )


def watcher(registry: Registry, source: FakeStore, **settings: object) -> DropWatcher:
    return DropWatcher(registry, source, DropSettings(url="s3://bucket/drop", base=BASE, settle_s=1, **settings))


async def looks(one: DropWatcher, times: int = 2) -> dict[str, str]:
    """What the last of some looks made of each folder."""
    for _ in range(times):
        outcomes = await one.look()
        await ended(one._registry)
    return {outcome.prefix: outcome.what for outcome in outcomes}


async def ended(registry: Registry) -> None:
    """A gateway ends what waits: every version is warm."""
    view = RegistryView(registry, 1)
    await view.refresh()
    for entry in view.adapters():
        for alias, move in entry.pending.items():
            with contextlib.suppress(errors.VersionConflict):  # another watcher wanted something else meanwhile
                await registry.finish_move(entry.base, entry.name, alias, move.id)


class TestWatching:
    async def test_steps_become_versions_in_their_order(self, registry: Registry, source: FakeStore, tmp_path: Path) -> None:
        for step in (100, 20, 9):
            await put(source, f"r1/global_step_{step}/policy/", files_of(plain(seed=step), tmp_path))
        one = watcher(registry, source, promote="canary")
        assert set((await looks(one)).values()) == {"published"}
        steps = [(await registry.manifest(AdapterRef(BASE, "r1", n))).source["step"] for n in (1, 2, 3)]
        assert steps == [9, 20, 100]
        assert (await registry.head(BASE, "r1")).aliases == {"canary": 3}
        assert await looks(one) == {}, "what is done is no news"

    async def test_only_what_is_whole_and_settled_is_taken(self, registry: Registry, source: FakeStore, tmp_path: Path) -> None:
        files = files_of(plain(), tmp_path)
        one = watcher(registry, source)
        await put(source, "a/", {CONFIG: files[CONFIG]})
        assert await looks(one, 3) == {"a/": "waiting"}
        await source.put(f"a/{WEIGHTS}", files[WEIGHTS][:-4])
        assert await looks(one, 3) == {"a/": "waiting"}
        await source.put(f"a/{WEIGHTS}", files[WEIGHTS])
        assert await looks(one, 1) == {"a/": "waiting"}, "one look more"
        assert await looks(one, 1) == {"a/": "published"}

    async def test_a_refused_one_is_told_once_and_tried_again_when_it_changes(
        self, registry: Registry, source: FakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        await put(source, "a/", files_of(plain().configured(use_dora=True), tmp_path))
        one = watcher(registry, source)
        assert await looks(one) == {"a/": "refused"}
        assert await looks(one, 3) == {}
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        reads = source.count("get_range", WEIGHTS)
        restarted = watcher(registry, source)
        assert await looks(restarted) == {"a/": "refused"}
        assert source.count("get_range", WEIGHTS) - reads <= 1, "it is remembered: only the header is read"
        await put(source, "a/", files_of(plain(), tmp_path))
        assert await looks(one) == {"a/": "published"}

    async def test_a_published_one_is_not_read_again_after_a_restart(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        await put(source, "a/", files_of(plain(), tmp_path))
        await looks(watcher(registry, source))
        reads = source.count("get_range", WEIGHTS)
        assert await looks(watcher(registry, source)) == {"a/": "known"}
        assert source.count("get_range", WEIGHTS) - reads <= 1

    async def test_a_collected_version_does_not_come_back_by_itself(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        for step in (1, 2):
            await put(source, f"r/global_step_{step}/policy/", files_of(plain(seed=step), tmp_path))
        await looks(watcher(registry, source))
        await run(registry, await plan_for(registry, RetentionPolicy(keep_last=1, grace_s=0)))
        await looks(watcher(registry, source))
        assert set((await registry.head(BASE, "r")).collected) == {1}

    async def test_several_watchers_at_once_publish_once(self, registry: Registry, source: FakeStore, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            await put(source, f"r/global_step_{step}/policy/", files_of(plain(seed=step), tmp_path))
        watchers = [watcher(Registry(registry.store), source, promote="production") for _ in range(4)]
        await asyncio.gather(*(looks(one) for one in watchers))
        assert await registry.versions(BASE, "r") == [1, 2, 3]
        assert (await registry.head(BASE, "r")).aliases == {"production": 3}

    async def test_an_alias_that_has_users_moves_when_the_version_is_warm(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        one = watcher(registry, source, promote="production")
        await put(source, "r/global_step_1/policy/", files_of(plain(seed=1), tmp_path))
        await looks(one)
        await put(source, "r/global_step_3/policy/", files_of(plain(seed=3), tmp_path))
        for _ in range(2):
            await one.look()
        head = await registry.head(BASE, "r")
        assert (head.aliases, head.pending["production"].version) == ({"production": 1}, 2)
        await put(source, "r/global_step_2/policy/", files_of(plain(seed=2), tmp_path))
        for _ in range(2):
            await one.look()
        assert (await registry.head(BASE, "r")).pending == head.pending, "an earlier step ends no later one"

    async def test_a_rollback_is_not_undone(self, registry: Registry, source: FakeStore, tmp_path: Path) -> None:
        await put(source, "r/global_step_1/policy/", files_of(plain(seed=1), tmp_path))
        await put(source, "r/global_step_2/policy/", files_of(plain(seed=2), tmp_path))
        await looks(watcher(registry, source, promote="production"))
        await registry.rollback(BASE, "r", "production")
        for key in [key for key in registry.store.objects if key.startswith(layout.ADOPTED)]:  # type: ignore[attr-defined]
            await registry.store.delete(key)
        assert set((await looks(watcher(registry, source, promote="production"))).values()) == {"known"}
        assert (await registry.head(BASE, "r")).aliases == {"production": 1}

    async def test_a_late_early_step_is_not_promoted_over_a_later_one(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        one = watcher(registry, source, promote="production")
        await put(source, "r/global_step_40/policy/", files_of(plain(seed=40), tmp_path))
        await looks(one)
        await put(source, "r/global_step_20/policy/", files_of(plain(seed=20), tmp_path))
        await looks(one)
        assert await registry.versions(BASE, "r") == [1, 2]
        assert (await registry.head(BASE, "r")).aliases == {"production": 1}

    async def test_a_protected_alias_stays_and_the_version_is_there(
        self, registry: Registry, source: FakeStore, tmp_path: Path
    ) -> None:
        one = watcher(registry, source, promote="production")
        await put(source, "r/global_step_1/policy/", files_of(plain(seed=1), tmp_path))
        await looks(one)
        await registry.protect(BASE, "r", "production")
        await put(source, "r/global_step_2/policy/", files_of(plain(seed=2), tmp_path))
        await one.look()
        [outcome] = await one.look()
        assert (outcome.what, outcome.ref, outcome.reason) == ("published", f"{BASE}:r@2", "alias_protected")

    async def test_trouble_of_the_store_is_no_refusal(self, registry: Registry, source: FakeStore, tmp_path: Path) -> None:
        for step in (1, 2):
            await put(source, f"r/global_step_{step}/policy/", files_of(plain(seed=step), tmp_path))
        one = watcher(registry, source)
        await one.look()
        store = registry.store
        store.fail(errors.StoreThrottled("slow down"), method="put", times=math.inf)  # type: ignore[attr-defined]
        assert await looks(one, 1) == {"r/global_step_1/policy/": "failed", "r/global_step_2/policy/": "waiting"}
        store.heal()  # type: ignore[attr-defined]
        assert set((await looks(one, 1)).values()) == {"published"}

    async def test_it_survives_anything_and_ends_when_it_is_cancelled(
        self, registry: Registry, source: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await put(source, "a/", files_of(plain(), tmp_path))
        source.fail(errors.StoreUnreachable("no answer"), method="list", times=2)
        one, published = watcher(registry, source, interval_s=0.01), asyncio.Event()
        look = one.look

        async def look_and_tell() -> None:
            if any(outcome.what == "published" for outcome in await look()):
                published.set()

        monkeypatch.setattr(one, "look", look_and_tell)
        running = asyncio.create_task(one.run())
        await published.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    @pytest.mark.parametrize("wrong", [{"promote": "v7"}, {"promote": "latest"}])
    def test_settings_without_sense_are_refused_at_once(self, wrong: dict) -> None:
        with pytest.raises(errors.InvalidRequest):
            watcher(Registry(FakeStore()), FakeStore(), **wrong)
