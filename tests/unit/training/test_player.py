"""The player: mazes through an OpenAI endpoint, whatever it answers, and what is held beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import openai._base_client as openai_client
import pytest
import typer
from typer.testing import CliRunner

from adapters.errors import InvalidRequest
from tests.scripted_player import MODEL, Endpoint, Fault, refused
from training.base.architecture import MAZES
from training.maze import begin, evaluation_set, make_maze, messages, observe, oracle, step
from training.playing.choosing import RULES, decoded, named_tasks, parsed_seeds
from training.playing.command import play as play_command
from training.playing.comparing import as_lines, compared, read_played
from training.playing.player import NotPlayed, Seen, Table, Unanswerable, play
from training.runs.plan import evaluation_tasks
from training.spec import TrainSpec
from training.trajectory import Played, Sampling, Task, turn_dice

SEEDS = tuple(range(6))
TASKS = [Task(seed, dice=100 + seed) for seed in SEEDS]
GREEDY = Sampling(temperature=0.0, max_generate_length=8)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own pauses between tries; what a server asks for stays."""
    monkeypatch.setattr(openai_client, "INITIAL_RETRY_DELAY", 0.0)


def asked(endpoint: Endpoint, retries: int = 0) -> openai.AsyncOpenAI:
    plain = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=retries, timeout=20, http_client=plain)


async def played(endpoint: Endpoint, sampling: Sampling = GREEDY, *, retries: int = 0, **others: Any) -> list[Any]:
    tasks = others.pop("tasks", TASKS)
    async with asked(endpoint, retries) as client:
        return await play(client, Table(MODEL, endpoint.spec, sampling, **others), tasks, Seen())


class TestPlaying:
    async def test_what_plays_as_the_oracle_solves_everything_with_its_moves(self):
        with Endpoint(RULES, SEEDS) as endpoint:
            results = await played(endpoint)
        assert [one.maze_seed for one in results] == list(SEEDS)
        assert all(one.solved and one.stop_reason == "done" for one in results)
        assert [one.actions for one in results] == [oracle(make_maze(9, seed)) for seed in SEEDS]

    async def test_the_conversation_is_that_of_training(self):
        with Endpoint(RULES, [3]) as endpoint:
            (one,) = await played(endpoint, tasks=[Task(3)])
        episode = begin(RULES, 3)
        expected = messages(episode)
        for action in one.actions[:-1]:
            reply = f"<action>{action}</action>"
            turn = step(episode, reply)
            expected += [{"role": "assistant", "content": reply}, *observe(turn)]
            episode = turn.episode
        assert endpoint.bodies[-1]["messages"] == expected

    async def test_the_turn_limit_ends_an_episode_unsolved(self):
        short = replace(RULES, max_turns=3)
        with Endpoint(short, SEEDS) as endpoint:
            results = await played(endpoint)
        assert {(one.solved, one.turns, one.stop_reason) for one in results} == {(False, 3, "turns")}

    async def test_a_stop_in_the_last_turn_is_the_end_by_a_reply(self):
        moves = len(oracle(make_maze(9, 0)))
        with Endpoint(replace(RULES, max_turns=moves), [0]) as endpoint:
            (one,) = await played(endpoint, tasks=[Task(0)])
        assert (one.solved, one.stop_reason) == (True, "done")

    async def test_a_reply_without_an_action_costs_a_turn_and_is_kept(self):
        with Endpoint(RULES, SEEDS, mistaken=frozenset({2})) as endpoint:
            results = await played(endpoint)
        assert results[2].actions == ("?unreadable", *oracle(make_maze(9, 2)))

    async def test_greedy_asks_for_temperature_0_and_no_dice(self):
        with Endpoint(RULES, [0]) as endpoint:
            await played(endpoint, tasks=[Task(0, dice=5)])
        body = endpoint.bodies[0]
        assert (body["temperature"], body["max_tokens"]) == (0.0, 8)
        assert "seed" not in body

    async def test_sampling_asks_in_each_turn_with_the_dice_of_training(self):
        with Endpoint(RULES, [0]) as endpoint:
            await played(endpoint, Sampling(0.7, 0.9, 5, 8), tasks=[Task(0, dice=5)])
        body = endpoint.bodies[0]
        assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 5)
        assert [body["seed"] for body in endpoint.bodies] == [turn_dice(5, turn) for turn in range(len(endpoint.bodies))]

    async def test_no_more_than_asked_for_are_played_at_once(self):
        with Endpoint(RULES, SEEDS) as endpoint:
            await played(endpoint, at_once=2)
        assert endpoint.most_together <= 2

    async def test_a_conversation_that_grew_too_long_gets_no_reply(self):
        with Endpoint(RULES, [0]) as endpoint:
            (one,) = await played(endpoint, tasks=[Task(0)], max_input_length=8)
        assert (one.solved, one.turns, one.stop_reason) == (False, 1, "length")

    async def test_mazes_of_another_size_are_played_by_the_same_rules(self):
        with Endpoint(replace(RULES, size=7), [1]) as endpoint:
            async with asked(endpoint) as client:
                (one,) = await play(client, Table(MODEL, RULES, GREEDY), [Task(1, size=7)], Seen())
        assert (one.size, one.solved) == (7, True)


class TestTrouble:
    @pytest.mark.parametrize(
        "fault",
        [
            refused(429, "rate_limit_exceeded", retry_after_ms="1"),
            refused(503, "overloaded"),
            refused(500, "internal_error"),
            Fault(hang_up=True),
        ],
        ids=["429", "503", "500", "hung up"],
    )
    async def test_what_passes_is_asked_again_and_costs_no_turn(self, fault: Fault):
        with Endpoint(RULES, SEEDS, faults=[fault, fault]) as endpoint:
            results = await played(endpoint, retries=3)
        assert [one.actions for one in results] == [oracle(make_maze(9, seed)) for seed in SEEDS]

    async def test_an_episode_that_breaks_off_is_not_unsolved_but_not_played(self):
        with Endpoint(RULES, SEEDS, broken=frozenset({4})) as endpoint:
            results = await played(endpoint, retries=1)
        assert results[4] == NotPlayed(4, 9, 0, "invalid_request", "told invalid_request")
        assert all(isinstance(one, Played) and one.solved for one in results if one.maze_seed != 4)

    async def test_retries_end(self):
        with Endpoint(RULES, [0], always=refused(503, "overloaded", retry_after_ms="1")) as endpoint:
            (one,) = await played(endpoint, tasks=[Task(0)], retries=2)
        assert one.reason == "overloaded"
        assert len(endpoint.bodies) == 3

    async def test_a_dead_endpoint_is_given_up_after_a_few_episodes(self):
        tasks = [Task(seed) for seed in range(100)]
        with Endpoint(RULES, [], always=Fault(hang_up=True)) as endpoint:
            results = await played(endpoint, tasks=tasks, at_once=4)
        reasons = [one.reason for one in results]
        assert set(reasons) == {"no_connection", "abandoned"}
        assert reasons.count("no_connection") < 16

    @pytest.mark.parametrize(("status", "code"), [(404, "model_not_found"), (401, "invalid_api_key"), (403, "forbidden")])
    async def test_what_will_never_be_answered_ends_everything(self, status: int, code: str):
        with Endpoint(RULES, SEEDS, always=refused(status, code)) as endpoint, pytest.raises(Unanswerable) as caught:
            await played(endpoint, retries=3)
        assert caught.value.code == code

    @pytest.mark.parametrize("body", ["<html>", "{}", '{"choices": []}', "[]", '"yes"'])
    async def test_an_answer_that_is_no_completion_is_not_a_turn(self, body: str):
        with Endpoint(RULES, [0], always=Fault(200, body)) as endpoint:
            (one,) = await played(endpoint, tasks=[Task(0)])
        assert (one.reason, one.turns) == ("bad_answer", 0)


def one(seed: int, solved: bool, *actions: str) -> Played:
    return Played(seed, 9, solved, len(actions), actions, "done")


class TestComparing:
    def test_equal_moves_are_the_same(self):
        found = compared([one(1, True, "up", "stop")], [one(1, True, "up", "stop")])
        assert found.same_moves
        assert found.same_solves
        assert found.holds(greedy=True)

    def test_the_first_move_that_parts_is_named(self):
        found = compared([one(1, False, "up", "left", "stop")], [one(1, True, "up", "right", "stop")])
        (difference,) = found.differences
        assert (difference.first_move, difference.move, difference.move_there) == (2, "left", "right")
        assert not found.same_solves

    def test_the_same_solves_by_other_moves_hold_only_where_dice_were_rolled(self):
        found = compared([one(1, True, "up", "stop")], [one(1, True, "up", "up", "stop")])
        assert found.same_solves
        assert not found.same_moves
        assert found.holds(greedy=False)
        assert not found.holds(greedy=True)

    def test_a_maze_that_was_not_played_here_is_missing_and_no_agreement(self):
        found = compared([one(1, True, "stop")], [one(1, True, "stop"), one(2, True, "stop")])
        assert found.missing == ((9, 2),)
        assert not found.holds(greedy=False)

    def test_what_is_written_reads_as_it_was(self, tmp_path):
        results = [one(1, True, "up", "stop"), one(2, False, "?unreadable")]
        (tmp_path / "played.jsonl").write_text(as_lines(results))
        assert read_played(tmp_path / "played.jsonl") == results

    @pytest.mark.parametrize("line", ["{}", "nonsense", "3", '{"maze_seed": 1}'])
    def test_a_line_that_is_no_played_maze_is_named(self, tmp_path, line):
        (tmp_path / "played.jsonl").write_text(as_lines([one(1, True, "stop")]) + line + "\n")
        with pytest.raises(InvalidRequest, match=r"line 2 of played\.jsonl"):
            read_played(tmp_path / "played.jsonl")


class TestChoosing:
    def test_the_rules_are_those_that_the_base_was_made_for(self):
        assert RULES == MAZES

    def test_a_set_is_played_with_the_dice_of_the_trainers_evaluation(self):
        assert named_tasks("easy-64", None, None, None) == ("easy-64", evaluation_tasks(evaluation_set("easy-64")))

    def test_a_specs_decoding_is_taken_over_and_the_command_line_goes_over_it(self):
        spec = TrainSpec.from_values({}, ["generator.sampling_params.temperature=0.7", "generator.sampling_params.top_k=4"])
        assert decoded(spec, False, None, 8) == Sampling(0.7, 1.0, 4, 8)
        assert decoded(spec, False, 0.2, None).temperature == 0.2
        assert decoded(spec, True, None, None).temperature == 0.0

    def test_seeds_are_numbers_and_ranges(self):
        assert parsed_seeds("7, 9,100-102") == [7, 9, 100, 101, 102]

    @pytest.mark.parametrize("text", ["", "a", "5-", "-5", "9-7", "3,3", "4294967296", "0-100000", "1,,2"])
    def test_seeds_that_are_none_are_refused(self, text):
        with pytest.raises(InvalidRequest):
            parsed_seeds(text)


class TestCommand:
    @pytest.fixture
    def endpoint(self) -> Iterator[Endpoint]:
        with Endpoint(RULES, SEEDS) as endpoint:
            yield endpoint

    def run(self, endpoint: Endpoint, *options: str) -> Any:
        app = typer.Typer()
        app.command()(play_command)
        return CliRunner().invoke(app, [MODEL, "--url", endpoint.url, "--retries", "0", *options], terminal_width=200)

    def test_counts_what_the_mazes_say_and_names_who_answered(self, endpoint):
        done = self.run(endpoint, "--seeds", "0-5", "--greedy")
        assert done.exit_code == 0, done.output
        assert "6/6" in done.output
        assert "100.0%" in done.output
        assert MODEL in done.output

    def test_the_lines_that_it_leaves_are_a_trainers(self, endpoint, tmp_path):
        file = tmp_path / "new" / "played.jsonl"
        done = json.loads(self.run(endpoint, "--seeds", "0-2", "--greedy", "--json", "--out", str(file)).stdout)
        assert (done["mazes"], done["solved"], done["solve_rate"], done["decoding"]) == (3, 3, 1.0, "greedy")
        assert [one.actions for one in read_played(file)] == [oracle(make_maze(9, seed)) for seed in range(3)]

    def test_the_same_moves_as_the_evaluation_are_said_to_be(self, endpoint, tmp_path):
        self.run(endpoint, "--seeds", "0-5", "--greedy", "--out", str(tmp_path / "there.jsonl"))
        done = self.run(endpoint, "--seeds", "0-5", "--greedy", "--beside", str(tmp_path / "there.jsonl"))
        assert done.exit_code == 0
        assert "the same moves in every maze" in done.output

    def test_greedy_moves_that_differ_end_with_1_and_are_listed(self, endpoint, tmp_path):
        self.run(endpoint, "--seeds", "0-5", "--greedy", "--out", str(tmp_path / "there.jsonl"))
        endpoint.mistaken = frozenset({2})
        done = self.run(endpoint, "--seeds", "0-5", "--greedy", "--beside", str(tmp_path / "there.jsonl"))
        assert done.exit_code == 1
        assert "maze 2: solved here, solved there; move 1 is ?unreadable here" in done.output

    def test_a_maze_that_could_not_be_played_is_named_and_ends_with_1(self, endpoint):
        endpoint.broken = frozenset({3})
        done = self.run(endpoint, "--seeds", "0-5", "--greedy")
        assert done.exit_code == 1
        assert "5/5" in done.output
        assert "not played: maze 3 (invalid_request)" in done.output

    def test_several_versions_behind_an_alias_are_told(self, endpoint):
        endpoint.models = (MODEL, "maze:agent@4")
        assert "several versions answered" in self.run(endpoint, "--seeds", "0-5", "--greedy").output

    def test_an_unknown_model_is_one_error(self, endpoint):
        endpoint.always = refused(404, "model_not_found")
        done = self.run(endpoint, "--seeds", "0-5", "--json")
        assert done.exit_code == 1
        assert json.loads(done.stderr)["error"]["reason"] == "model_not_found"

    def test_one_maze_can_be_watched_turn_by_turn(self, endpoint):
        shown = self.run(endpoint, "--show", "3", "--greedy").output
        moves = oracle(make_maze(9, 3))
        assert shown.count("Moved.") == len(moves) - 1
        assert "Stopped. Solved." in shown

    @pytest.mark.parametrize(
        "options",
        [("--set", "easy-65"), ("--set", "easy-64", "--seeds", "1"), ("--seeds", "x"), ("--greedy", "--temperature", "1")],
    )
    def test_what_makes_no_sense_is_wrong_usage(self, endpoint, options):
        assert self.run(endpoint, *options).exit_code == 2

    def test_what_a_reply_says_cannot_steer_the_terminal(self, endpoint):
        endpoint.mistaken = frozenset({3})
        endpoint.wrong_reply = "\x1b[2J<action>fly</action>"
        shown = self.run(endpoint, "--show", "3", "--greedy").output
        assert "\x1b" not in shown
