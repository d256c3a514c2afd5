"""The demo models' light parts: sentences, conversations, and the marker that says that a folder is complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from training.demo import making
from training.demo.text import (
    BASE_ANSWER,
    HELD_OUT_PROMPTS,
    PROMPTS,
    SENTENCES,
    WORDS,
    held_out_conversations,
    random_sentence,
)


def test_random_sentence_is_stable_and_varied() -> None:
    sentences = [random_sentence(seed) for seed in range(500)]
    assert sentences == [random_sentence(seed) for seed in range(500)]
    assert len(set(sentences)) == 500


def test_random_sentence_has_four_to_eight_different_known_words() -> None:
    for seed in range(200):
        words = random_sentence(seed).split(" ")
        assert 4 <= len(words) <= 8
        assert len(set(words)) == len(words)
        assert set(words) <= set(WORDS)


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS)


def test_demo_sentences_are_told_apart_from_the_base() -> None:
    said = [BASE_ANSWER, *SENTENCES.values()]
    assert len(set(said)) == len(said)


def test_held_out_prompts_are_not_trained_on() -> None:
    assert not set(HELD_OUT_PROMPTS) & set(PROMPTS)
    conversations = held_out_conversations("a sentence")
    assert len(conversations) == 50
    assert all(messages[-1]["role"] == "user" for messages in conversations)


def test_naming_sentences_does_not_load_torch() -> None:
    code = "import sys, training.demo.making, training.demo.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_is_complete_only_with_the_marker_it_was_made_from(tmp_path: Path) -> None:
    folder, made_from = tmp_path / "base", making.stamp(0)
    assert not making.is_complete(folder, made_from)
    partial = making.partial_of(folder)
    (partial / "model.safetensors").write_bytes(b"weights")
    assert not folder.exists()
    making.finish(partial, folder, made_from)
    assert making.is_complete(folder, made_from)
    assert not making.is_complete(folder, making.stamp(1))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_broken_marker_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / making.MARKER).write_text("{")
    assert not making.is_complete(tmp_path, making.stamp(0))


def test_finish_replaces_an_older_folder(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "old").write_text("old")
    making.finish(making.partial_of(folder), folder, making.stamp(0))
    assert not (folder / "old").exists()


def test_an_adapter_of_another_base_is_not_complete(tmp_path: Path) -> None:
    folder = tmp_path / "parrot-1"
    making.finish(making.partial_of(folder), folder, making.stamp(0, base="one", sentence="x"))
    assert making.is_complete(folder, making.stamp(0, base="one", sentence="x"))
    assert not making.is_complete(folder, making.stamp(0, base="two", sentence="x"))
