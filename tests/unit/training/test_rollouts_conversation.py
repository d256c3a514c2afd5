"""Conversations as ids: what the chat template would render, and never a sampled token changed."""

from __future__ import annotations

import pytest

from training.base.architecture import make_tokenizer
from training.maze import MazeSpec, begin, messages, observe, oracle, step
from training.maze.actions import as_text
from training.rollouts import BadTemplate
from training.rollouts.conversation import Wording

SPECS = {
    "picture": MazeSpec(cell_px=16, actions="keyword"),
    "text": MazeSpec(observation="text", actions="tuple"),
    "visgym": MazeSpec(cell_px=16, prompt="visgym"),
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def wording(tokenizer):
    return Wording(tokenizer)


def rendered(tokenizer, talk) -> list[int]:
    """What a server makes of the conversation."""
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_whole_conversation_has_the_ids_that_a_server_would_make_of_it(tokenizer, wording, spec):
    episode = begin(spec, 7)
    talk = messages(episode)
    ids = list(wording.prompt(messages(episode, with_pictures=False)))
    assert ids == rendered(tokenizer, talk)
    for action in oracle(episode.maze)[:-1]:
        reply = as_text(action, spec.actions)
        turn = step(episode, reply)
        sampled = (*tokenizer.encode(reply, add_special_tokens=False), wording.end_of_turn)
        ids += [*sampled, *wording.between(sampled, observe(turn, with_pictures=False))]
        talk += [{"role": "assistant", "content": reply}, *observe(turn)]
        episode = turn.episode
        assert ids == rendered(tokenizer, talk)


def test_a_picture_is_one_image_token(tokenizer, wording):
    ids = wording.prompt(messages(begin(SPECS["picture"], 7), with_pictures=False))
    assert ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 1


def test_a_reply_that_was_cut_gets_the_end_of_its_turn(wording):
    observed = [{"role": "user", "content": "Moved."}]
    whole, cut = wording.between((5, wording.end_of_turn), observed), wording.between((5, 6), observed)
    assert cut == (wording.end_of_turn, *whole)


def test_a_reply_without_any_token_gets_the_end_of_its_turn(wording):
    assert wording.between((), [{"role": "user", "content": "Moved."}])[0] == wording.end_of_turn


def test_a_template_that_words_earlier_turns_anew_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(BadTemplate, match="does not continue conversations"):
        Wording(tokenizer)


def test_a_template_without_a_token_for_the_end_of_a_reply_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}. {% endfor %}"
    with pytest.raises(BadTemplate, match="ends a reply with"):
        Wording(tokenizer)
