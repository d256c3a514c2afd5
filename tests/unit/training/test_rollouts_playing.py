"""Episodes in lock-step with an engine that answers by a script: what comes of them, in which order, and what ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from training.base.architecture import make_tokenizer
from training.maze import Episode, MazeSpec, oracle
from training.maze.actions import as_text
from training.rollouts import BadRollout
from training.rollouts.conversation import Wording
from training.rollouts.playing import Prompt, Reply, Rules, play, waves
from training.trajectory import Sampling, Task, turn_dice

MAZE = MazeSpec(cell_px=16, actions="keyword")
RULES = Rules(MAZE, max_prompt_length=400, max_input_length=3000)
SAMPLING = Sampling(max_generate_length=8)
PICTURE_TOKENS = 81


def the_way(state: Episode) -> str:
    return as_text(oracle(state.maze, state.position)[0], "keyword")


def nothing(state: Episode) -> str:
    return "left"  # no action: it has no tags


@dataclass
class Scripted:
    """Answers what `say` says to the last state that it was shown; token by token as its tokenizer would."""

    tokenizer: object
    say: Callable[[Episode], str] = the_way
    room: int = 100
    max_model_len: int = 4096
    asked: list[list[Prompt]] = field(default_factory=list)
    forgot_before: list[int] = field(default_factory=list)

    def forget(self) -> None:
        self.forgot_before.append(len(self.asked))

    def reply(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        self.asked.append(list(prompts))
        return [self._reply(prompt) for prompt in prompts]

    def _reply(self, prompt: Prompt) -> Reply:
        text = self.say(prompt.pictured[-1])
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        read = len(prompt.token_ids) + (PICTURE_TOKENS - 1) * len(prompt.pictured)
        return Reply(read, ids, tuple(-0.1 * place for place in range(1, len(ids) + 1)), text)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def engine(tokenizer):
    return Scripted(tokenizer)


@pytest.fixture(scope="module")
def wording(tokenizer):
    return Wording(tokenizer)


def test_who_knows_the_way_solves_the_maze_and_is_done(engine, wording):
    (played,) = play(engine, wording, RULES, [Task(3)], SAMPLING, 5)
    assert (played.solved, played.reward, played.stop_reason, played.policy_step) == (True, 1.0, "done", 5)


def test_trajectories_come_in_the_order_of_tasks(engine, wording):
    tasks = [Task(seed, sample) for sample in range(2) for seed in (3, 1, 2)]
    assert [one.task for one in play(engine, wording, RULES, tasks, SAMPLING, 0)] == tasks


def test_all_that_are_not_over_take_a_turn_with_each_call(engine, wording):
    played = play(engine, wording, RULES, [Task(seed) for seed in range(6)], SAMPLING, 0)
    assert [len(prompts) for prompts in engine.asked] == [
        sum(one.turns > turn for one in played) for turn in range(max(one.turns for one in played))
    ]


def test_the_loss_is_on_what_was_sampled_alone(engine, wording, tokenizer):
    (played,) = play(engine, wording, RULES, [Task(3)], SAMPLING, 0)
    answer = played.token_ids[played.prompt_tokens :]
    sampled = [token for token, is_sampled in zip(answer, played.loss_mask, strict=True) if is_sampled]
    assert tokenizer.decode(sampled) == "".join(f"{reply}<|im_end|>" for reply in played.replies)


def test_log_probs_are_the_engines_where_it_sampled_and_zero_elsewhere(engine, wording):
    (played,) = play(engine, wording, RULES, [Task(3)], SAMPLING, 0)
    found = [log_prob for log_prob, is_sampled in zip(played.log_probs, played.loss_mask, strict=True) if is_sampled]
    assert found == [-0.1 * place for place in range(1, 5)] * played.turns
    assert all(log_prob == 0 for log_prob, is_sampled in zip(played.log_probs, played.loss_mask, strict=True) if not is_sampled)


def test_each_image_token_has_its_state(engine, wording, tokenizer):
    (played,) = play(engine, wording, RULES, [Task(3)], SAMPLING, 0)
    assert played.token_ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == len(played.pictured) == played.turns
    assert [state.turns for state in played.pictured] == list(range(played.turns))


def test_each_prompt_is_the_one_before_with_more_after_it(engine, wording):
    play(engine, wording, RULES, [Task(3)], SAMPLING, 0)
    asked = [prompts[0].token_ids for prompts in engine.asked]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(asked))


def test_who_never_stops_is_ended_by_the_turns(tokenizer, wording):
    (played,) = play(Scripted(tokenizer, nothing), wording, RULES, [Task(3)], SAMPLING, 0)
    assert (played.stop_reason, played.turns, played.solved) == ("turns", MAZE.max_turns, False)
    assert set(played.outcomes) == {"unreadable"}


def test_a_conversation_that_gets_too_long_ends_before_what_made_it_so(engine, wording):
    (played,) = play(engine, wording, Rules(MAZE, 400, 400), [Task(3)], SAMPLING, 0)
    assert (played.stop_reason, played.solved, played.reward) == ("length", False, 0.0)
    assert played.loss_mask[-1] == 1
    assert len(played.pictured) == played.turns


def test_the_engines_own_length_counts_with_the_reply(tokenizer, wording):
    engine = Scripted(tokenizer, max_model_len=408)
    played = play(engine, wording, RULES, [Task(3)], SAMPLING, 0)
    assert played == play(Scripted(tokenizer), wording, Rules(MAZE, 400, 400), [Task(3)], SAMPLING, 0)


def test_a_prompt_that_is_too_long_is_refused_with_the_limit(engine, wording):
    with pytest.raises(BadRollout, match=r"trainer.max_prompt_length is 100"):
        play(engine, wording, Rules(MAZE, 100, 3000), [Task(3)], SAMPLING, 0)


def test_replies_that_leave_no_place_for_a_prompt_are_refused(engine, wording):
    with pytest.raises(BadRollout, match=r"max_generate_length \(4000\)"):
        play(engine, wording, RULES, [Task(3)], Sampling(max_generate_length=4000), 0)


def test_a_task_may_have_a_size_of_its_own(engine, wording):
    (played,) = play(engine, wording, RULES, [Task(3, size=11)], SAMPLING, 0)
    assert {state.maze.size for state in played.pictured} == {11}


def test_dice_are_of_the_task_and_the_turn(engine, wording):
    play(engine, wording, RULES, [Task(3, 0, 9), Task(3, 1, 10)], SAMPLING, 0)
    assert [prompt.dice for prompt in engine.asked[2]] == [turn_dice(9, 2), turn_dice(10, 2)]
    assert len({prompt.dice for prompts in engine.asked for prompt in prompts}) == sum(map(len, engine.asked))


def test_dice_of_a_turn_are_the_same_for_ever():
    assert [turn_dice(0, 0), turn_dice(2**63 - 1, 20)] == [8865205908059109814, 2950575523372239974]


def test_what_the_engine_has_no_room_for_is_played_later_and_it_forgets_in_between(tokenizer, wording):
    tasks = [Task(seed, sample) for seed in range(3) for sample in range(2)]
    engine = Scripted(tokenizer, room=4)
    played = play(engine, wording, RULES, tasks, SAMPLING, 0)
    assert played == play(Scripted(tokenizer), wording, RULES, tasks, SAMPLING, 0)
    assert engine.forgot_before == [0, max(one.turns for one in played[:4])]


def test_groups_stay_together_in_waves_unless_one_is_larger_than_a_wave():
    tasks = [Task(seed) for seed in (1, 2, 1, 2, 1, 3)]
    assert waves(tasks, 3) == [[0, 2, 4], [1, 3, 5]]
    assert waves(tasks, 2) == [[0, 2], [4], [1, 3], [5]]


def test_nothing_to_play_is_fine(engine, wording):
    assert play(engine, wording, RULES, [], SAMPLING, 0) == []
