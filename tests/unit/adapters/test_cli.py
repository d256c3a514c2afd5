"""The author commands, against a registry in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.inspect_command import load_contract
from adapters.registry.codec import encode_contract
from tests import adapter_folders
from tests.author import Author

LORAMUX = Path(sys.executable).with_name("loramux")


@pytest.fixture
def author(tmp_path: Path) -> Author:
    author = Author(tmp_path)
    author.put_base(adapter_folders.TEXT)
    return author


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Four adapters; the first has number 1."""
    return [str(adapter_folders.plain(seed=seed).write(tmp_path / f"adapter-{seed}")) for seed in range(5)]


@pytest.fixture
def parrot(author: Author, folders: list[str]) -> Author:
    """An author with `parrot` in three versions, the first of them in production."""
    author.run("publish", folders[1], "--name", "parrot", "--promote", "-m", "first")
    author.run("publish", folders[2], "--name", "parrot")
    author.run("publish", folders[3], "--name", "parrot")
    return author


# Publishing


def test_an_author_publishes_promotes_and_rolls_back(author: Author, folders: list[str]):
    first = author.json("publish", folders[1], "--name", "sql", "--promote", "-m", "first")
    assert (first["created"], first["ref"], first["promoted"]) == (True, "tiny/base:sql@1", "production")
    assert author.json("publish", folders[2], "--name", "sql")["ref"] == "tiny/base:sql@2"
    assert "is now version 2" in author.run("promote", "sql", "2", "-m", "better")
    assert "is now version 1" in author.run("rollback", "sql")
    shown = author.json("show", "sql")
    assert shown["aliases"] == {"production": 1}
    assert [row["kind"] for row in shown["history"]] == ["rollback", "promote", "promote"]


def test_the_same_content_twice_is_one_version(author: Author, folders: list[str]):
    author.run("publish", folders[1], "--name", "sql")
    again = author.json("publish", folders[1], "--name", "sql")
    assert (again["created"], again["version"]) == (False, 1)


def test_a_version_carries_what_its_author_says_of_it(author: Author, folders: list[str]):
    words = ("--tag", "data=v3", "--metric", "solved=0.71", "--source-run", "maze-7", "--source-step", "40", "-m", "why not")
    author.run("publish", folders[1], "--name", "sql", *words)
    version = author.json("show", "sql")["versions"][0]
    assert version["tags"] == {"data": "v3"}
    assert version["metrics"] == {"solved": 0.71}
    assert version["source"] == {"run": "maze-7", "step": 40}
    assert (version["who"], version["message"]) == ("ann", "why not")
    said = author.run("show", "sql")
    assert all(word in said for word in ("data=v3", "solved=0.71", "run=maze-7"))


def test_success_names_the_next_command_and_a_request_to_try(author: Author, folders: list[str]):
    said = author.run("publish", folders[1], "--name", "sql")
    assert "next: loramux promote tiny/base:sql 1" in said
    assert '"model": "tiny/base:sql@1"' in said


def test_quiet_prints_the_ref_alone(author: Author, folders: list[str]):
    assert author.run("publish", folders[1], "--name", "sql", "-q") == "tiny/base:sql@1\n"
    assert author.run("list", "-q") == "tiny/base:sql\n"
    assert author.run("show", "sql", "-q") == "tiny/base:sql@1\n"


def test_a_refusal_names_code_limit_and_value_and_leaves_nothing(author: Author, tmp_path: Path):
    folder = adapter_folders.plain(rank=64).write(tmp_path / "wide")
    said = author.refused("publish", str(folder), "--name", "sql")
    assert (said["reason"], said["value"], said["limit"]) == ("rank_too_large", 64, 8)
    assert said["hint"]
    assert author.json("list")["adapters"] == []


def test_an_error_has_three_parts_for_people(author: Author, tmp_path: Path):
    folder = adapter_folders.plain(rank=64).write(tmp_path / "wide")
    what, numbers, *hint = author.run("publish", str(folder), "--name", "sql", code=1).splitlines()
    assert what.startswith("adapter_incompatible (rank_too_large): ")
    assert numbers.strip() == "value 64, limit 8"
    assert hint


def test_a_name_with_capitals_gets_a_proposal(author: Author, folders: list[str]):
    assert author.refused("publish", folders[1], "--name", "Qwen3-SQL")["hint"] == "try `qwen3-sql`"


def test_on_a_terminal_the_proposal_is_a_question_and_the_original_is_kept(
    author: Author, folders: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("adapters.cli.publish.is_terminal", lambda: True)
    assert "publish as `qwen3-sql`?" in author.run("publish", folders[1], "--name", "Qwen3-SQL", stdin="y\n")
    assert author.json("show", "qwen3-sql")["versions"][0]["source"] == {"original_name": "Qwen3-SQL"}
    author.run("publish", folders[2], "--name", "Qwen3-SQL", stdin="n\n", code=1)
    assert len(author.json("show", "qwen3-sql")["versions"]) == 1


def test_a_dry_run_says_what_would_happen_and_writes_nothing(author: Author, folders: list[str]):
    said = author.json("publish", folders[1], "--name", "sql", "--dry-run")
    assert (said["publishable"], said["same_as"]) == (True, None)
    assert author.json("list")["adapters"] == []
    author.run("publish", folders[1], "--name", "sql")
    assert author.json("publish", folders[1], "--name", "sql", "--dry-run")["same_as"] == "tiny/base:sql@1"


def test_a_protected_alias_is_found_out_before_anything_is_sent(parrot: Author, folders: list[str]):
    parrot.run("protect", "parrot")
    assert parrot.refused("publish", folders[4], "--name", "parrot", "--promote")["reason"] == "alias_protected"
    assert len(parrot.json("show", "parrot")["versions"]) == 3
    assert parrot.json("publish", folders[4], "--name", "parrot", "--promote", "--unlock")["version"] == 4


def test_inspect_needs_no_registry(author: Author, folders: list[str], tmp_path: Path):
    contract = tmp_path / "base.json"
    contract.write_bytes(encode_contract(adapter_folders.TEXT))
    assert load_contract(contract) == adapter_folders.TEXT
    (tmp_path / "loramux.yaml").unlink()
    assert author.json("inspect", folders[1], "--contract", str(contract))["publishable"]


# Looking


def test_list_shows_what_is_live_and_what_is_tried(parrot: Author):
    parrot.run("promote", "parrot", "2", "--weight", "10")
    header, row = parrot.run("list").splitlines()
    assert header.split() == ["ADAPTER", "PRODUCTION", "CANARY", "NEWEST", "VERSIONS", "RANK", "SIZE", "AGE"]
    assert row.split()[:5] == ["tiny/base:parrot", "1", "2", "(10%)", "3"]


def test_list_takes_globs_and_filters(parrot: Author, folders: list[str]):
    parrot.run("publish", folders[4], "--name", "team/sql", "--tag", "draft=yes")

    def listed(*words: str) -> list[str]:
        return [row["name"] for row in parrot.json("list", *words)["adapters"]]

    assert listed() == ["parrot", "team/sql"]
    assert listed("team/*") == ["team/sql"]
    assert listed("versions>2 rank>=4") == ["parrot"]
    assert listed("size>1GB") == []
    assert listed("age<1h", "--sort", "-versions") == ["team/sql", "parrot"]
    assert listed("--tag", "draft=yes") == listed("--tag", "draft") == ["team/sql"]
    assert listed("--alias", "production") == ["parrot"]
    assert listed("--base", "other") == []
    assert listed("--limit", "1") == ["parrot"]
    assert "no adapter fits nothing" in parrot.run("list", "nothing")


def test_an_empty_registry_names_the_first_command(author: Author):
    assert "next: loramux publish" in author.run("list")


def test_show_takes_one_version(parrot: Author):
    assert [version["version"] for version in parrot.json("show", "parrot@2")["versions"]] == [2]
    assert [version["version"] for version in parrot.json("show", "parrot@production")["versions"]] == [1]


def test_other_people_s_words_don_t_steer_the_terminal(parrot: Author):
    parrot.run("promote", "parrot", "2", "-m", "red \x1b[31m alert\nand a second line", "--alias", "canary")
    parrot.run("tag", "parrot@2", "colour=\x1b]0;title\x07")
    for command in ("show", "history", "rollout"):
        said = parrot.run(command, "parrot")
        assert "\x1b" not in said
        assert "\x07" not in said
    assert "red \ufffd[31m alert and a second line" in parrot.run("history", "parrot")
    assert "\x1b" in parrot.json("history", "parrot")["history"][0]["message"]


def test_the_base_may_be_left_out_where_one_has_the_adapter(parrot: Author, folders: list[str]):
    parrot.put_base(adapter_folders.contract_of("model"))
    other = adapter_folders.contract_of("model")
    parrot.put_base(type(other)("other/base", other.fingerprint, other.modules, other.max_rank))
    assert parrot.json("show", "parrot")["base"] == "tiny/base"
    parrot.run("publish", folders[4], "--name", "parrot", "--base", "other/base")
    said = parrot.refused("show", "parrot")
    assert "other/base, tiny/base" in said["message"]
    assert parrot.json("show", "other/base:parrot")["base"] == "other/base"


def test_history_tells_what_was_live_then(parrot: Author):
    between = parrot.json("promote", "parrot", "2", "-m", "better") and parrot.json("history", "parrot")["history"][0]["at"]
    parrot.run("promote", "parrot", "3")
    then = parrot.json("history", "parrot", "--at", between)
    assert then["live"]["production"]["version"] == 2
    assert then["live"]["production"]["message"] == "better"
    assert parrot.json("history", "parrot", "--at", "2020-01-01")["live"] == {"production": None}
    assert "was version 3" in parrot.run("history", "parrot", "--at", "now")
    assert [row["to_version"] for row in parrot.json("history", "parrot", "--limit", "2")["history"]] == [3, 2]


# Moving


def test_a_share_goes_to_the_new_version_and_the_rest_stays(parrot: Author):
    said = parrot.run("promote", "parrot", "2", "--weight", "10")
    assert "90% to version 1, 10% to version 2" in said
    assert "loramux promote tiny/base:parrot --full" in said
    moved = parrot.json("promote", "parrot", "2", "--weight", "50")
    assert (moved["weights"], moved["version"]) == ({"production": {"1": 50, "2": 50}}, 1)
    third = parrot.json("promote", "parrot", "3", "--weight", "10")
    assert third["weights"] == {"production": {"1": 45, "2": 45, "3": 10}}


def test_full_takes_the_version_under_trial_and_abort_goes_back(parrot: Author):
    parrot.run("promote", "parrot", "2", "--weight", "10")
    assert parrot.json("abort", "parrot")["weights"] == {}
    assert parrot.head("parrot").aliases == {"production": 1}
    assert parrot.refused("abort", "parrot")["reason"] == "not_shared"
    parrot.run("promote", "parrot", "2", "--weight", "0.5")
    assert parrot.head("parrot").weights == {"production": {1: 199, 2: 1}}
    parrot.run("promote", "parrot", "--full")
    assert parrot.head("parrot").aliases == {"production": 2}
    assert parrot.refused("promote", "parrot", "--full")["reason"] == "not_shared"


def test_a_version_is_promoted_by_the_alias_that_names_it(parrot: Author):
    parrot.run("promote", "parrot", "2", "--alias", "canary")
    assert parrot.json("promote", "parrot@canary")["aliases"] == {"canary": 2, "production": 2}
    assert parrot.json("promote", "parrot@latest")["aliases"]["production"] == 3
    assert parrot.refused("promote", "parrot@beta")["hint"] == "it has `@canary`, `@production`"


def test_nobody_shares_an_alias_with_nothing(parrot: Author):
    assert parrot.refused("promote", "parrot", "2", "--alias", "beta", "--weight", "10")["reason"] == "nothing_to_share_with"


def test_what_is_true_already_is_no_move(parrot: Author):
    before = parrot.head("parrot").revision
    assert "unchanged" in parrot.run("promote", "parrot", "1")
    assert parrot.json("promote", "parrot", "1")["changed"] is False
    assert parrot.head("parrot").revision == before


def test_rollback_goes_only_to_versions_that_were_live(parrot: Author):
    parrot.run("promote", "parrot", "3")
    assert parrot.refused("rollback", "parrot", "--to", "2")["reason"] == "never_live"
    assert parrot.json("rollback", "parrot", "--to", "1", "-m", "worse")["aliases"] == {"production": 1}


def test_on_a_terminal_rollback_offers_what_was_live(parrot: Author, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("adapters.cli.moves.is_terminal", lambda: True)
    parrot.run("promote", "parrot", "2")
    parrot.run("promote", "parrot", "3")
    said = parrot.run("rollback", "parrot", stdin="1\n")
    assert "these were live before" in said
    assert parrot.head("parrot").aliases == {"production": 1}
    parrot.run("promote", "parrot", "3")
    parrot.run("rollback", "parrot", stdin="\n")
    assert parrot.head("parrot").aliases == {"production": 1}
    parrot.run("promote", "parrot", "3")
    assert "not in the list" in parrot.run("rollback", "parrot", stdin="7\n", code=1)
    parrot.run("rollback", "parrot", "--yes")


def test_a_protected_alias_moves_only_when_it_is_meant(parrot: Author):
    parrot.run("protect", "parrot", "-m", "ask ann")
    assert parrot.refused("promote", "parrot", "2")["reason"] == "alias_protected"
    said = parrot.run("promote", "parrot", "2", "--unlock")
    assert "undo: loramux rollback tiny/base:parrot --unlock" in said
    assert "(protected)" in parrot.run("show", "parrot")
    parrot.run("unprotect", "parrot")
    parrot.run("promote", "parrot", "3")


def test_an_alias_is_taken_away_and_named_again(parrot: Author):
    parrot.run("promote", "parrot", "2", "--alias", "canary")
    said = parrot.run("unset-alias", "parrot", "canary")
    assert "undo: loramux promote tiny/base:parrot 2 --alias canary" in said
    assert parrot.head("parrot").aliases == {"production": 1}
    assert parrot.refused("unset-alias", "parrot", "canary")["code"] == "model_not_found"


def test_a_retired_version_is_gone_until_it_is_restored(parrot: Author):
    assert parrot.json("retire", "parrot@3", "-m", "wrong data")["state"] == "retired"
    assert parrot.refused("promote", "parrot", "3")["code"] == "version_retired"
    assert parrot.json("promote", "parrot@latest")["version"] == 2
    assert parrot.json("restore", "parrot@3")["state"] == "ready"
    assert parrot.refused("retire", "parrot@2")["reason"] == "in_use"


def test_tags_are_set_and_wiped(parrot: Author):
    assert parrot.json("tag", "parrot@2", "a=1", "b=x=y")["tags"] == {"a": "1", "b": "x=y"}
    assert parrot.json("tag", "parrot@2", "a-")["tags"] == {"b": "x=y"}
    parrot.run("tag", "parrot@2", "neither", code=2)


def test_rollout_draws_aliases_weights_and_versions(parrot: Author):
    parrot.run("promote", "parrot", "2", "--weight", "10")
    said = parrot.run("rollout", "parrot")
    assert [line.split()[1] for line in said.splitlines()[1:]] == ["production", "@1", "@2"]
    tree = parrot.json("rollout", "parrot")["aliases"]["production"]["versions"]
    assert [(row["version"], row["percent"], row["state"]) for row in tree] == [(1, 90.0, "live"), (2, 10.0, "canary")]


def test_a_lost_race_is_told(parrot: Author):
    assert parrot.refused("promote", "parrot", "2", "--if-revision", "99")["code"] == "version_conflict"
    assert parrot.refused("promote", "parrot", "2", "--weight", "5", "--if-revision", "99")["code"] == "version_conflict"


# Files


def test_a_pulled_folder_is_what_was_published(parrot: Author, tmp_path: Path):
    pulled = parrot.json("pull", "parrot@2", "there")
    assert sorted(os.listdir(tmp_path / "there")) == ["adapter_config.json", "adapter_model.safetensors"]
    again = parrot.json("publish", str(tmp_path / "there"), "--name", "parrot")
    assert (again["version"], again["digest"]) == (2, pulled["digest"])
    assert parrot.json("pull", "parrot@2", "there")["fetched"] is False
    assert "something else" in parrot.refused("pull", "parrot@1", "there")["message"]


def test_a_corrupt_blob_is_never_left_in_the_folder(parrot: Author, tmp_path: Path):
    (weights,) = [path for path in tmp_path.glob("registry/blobs/*/adapter_model.safetensors") if _is_of(parrot, 2, path)]
    weights.write_bytes(b"x" * weights.stat().st_size)
    assert parrot.refused("pull", "parrot@2", "there")["reason"] == "digest_mismatch"
    assert not (tmp_path / "there").exists()
    assert not list(tmp_path.glob(".there*"))


def _is_of(author: Author, version: int, path: Path) -> bool:
    return author.json("show", "parrot")["versions"][version - 1]["digest"] == path.parent.name


def test_diff_tells_how_far_each_module_moved(parrot: Author):
    said = parrot.json("diff", "parrot@1", "parrot@2")
    assert (said["identical"], len(said["modules"])) == (False, 14)
    assert [row["relative"] for row in said["modules"]] == sorted((row["relative"] for row in said["modules"]), reverse=True)
    same = parrot.json("diff", "parrot@1", "parrot@1")
    assert (same["identical"], same["relative"]) == (True, 0.0)
    assert "have the same content" in parrot.run("diff", "parrot@1", "parrot@1")
    assert "MODULE" in parrot.run("diff", "parrot@1", "parrot@2", "--limit", "3")


# The program


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("promote", "nobody", "1"), 1, "model_not_found"),
        (("show", "nobody"), 1, "model_not_found"),
        (("publish", "nowhere", "--name", "sql"), 1, "invalid_request"),
        (("publish", ".", "--name", "SQL Model"), 1, "invalid_request"),
        (("show", "sql@v7"), 1, "try `@7`"),
        (("promote", "sql", "soon"), 2, "int"),
        (("promote", "sql"), 2, "which version?"),
        (("promote", "sql", "1", "--weight", "5", "--full"), 2, "exclude each other"),
        (("promote", "sql@2", "3"), 2, "there twice"),
        (("promote",), 2, "Missing argument"),
        (("list", "size>big"), 2, "no value for"),
        (("list", "colour=red"), 2, "is no filter"),
        (("list", "--sort", "colour"), 2, "nothing to sort by"),
        (("history", "sql", "--at", "soon"), 2, "is no time"),
        (("publish", ".", "--name", "sql", "--metric", "solved=well"), 2, "is no metric"),
        (("publish", ".", "--name", "sql", "--drop", "everything"), 2, "can't be dropped"),
        (("fly",), 2, "No such command"),
    ],
)
def test_what_goes_wrong_has_its_exit_code_and_words(author: Author, arguments, code, text):
    assert text in " ".join(author.run(*arguments, code=code).replace("│", " ").split())


def test_without_a_registry_the_message_says_where_to_name_one(author: Author, tmp_path: Path):
    (tmp_path / "loramux.yaml").unlink()
    assert "LORAMUX_REGISTRY__URL" in author.run("list", code=1)


@pytest.fixture
def installed(parrot: Author):
    """The installed program in a process of its own: exit code, stdout, stderr."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **env}
        return subprocess.run(
            [str(LORAMUX), *arguments], cwd=parrot.folder, capture_output=True, text=True, timeout=60, env=variables
        )

    return run


def test_the_installed_program_prints_no_colour_into_a_pipe(installed):
    done = installed("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "tiny/base:parrot" in done.stdout
    assert installed("show", "nobody").returncode == 1


def test_help_groups_the_commands(installed):
    shown = installed("--help").stdout
    places = [shown.index(f" {panel} ──") for panel in ("Publish", "Versions", "Aliases", "Try", "Run")]
    assert places == sorted(places)


def test_the_shell_completes_adapters_and_versions(installed):
    def offered(line: str) -> set[str]:
        words = {"_LORAMUX_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        done = installed(**words)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert offered("loramux show pa") == {"parrot"}
    assert offered("loramux retire parrot@") >= {"parrot@1", "parrot@3", "parrot@production", "parrot@latest"}
    assert "production" in offered("loramux list --alias p")
    assert "promote" in offered("loramux pro")


def test_completion_keeps_quiet_without_a_registry(installed, parrot: Author):
    (parrot.folder / "loramux.yaml").unlink()
    done = installed(_LORAMUX_COMPLETE="complete_bash", COMP_WORDS="loramux show p", COMP_CWORD="2")
    assert (done.stdout.strip(), done.stderr) == ("", "")
