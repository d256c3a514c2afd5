"""`inspect` tells people and programs the same: what would be refused, by which limit, and what to do."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from adapters.contract import PublishOptions
from adapters.errors import InvalidRequest
from adapters.inspect_command import inspect_folder
from adapters.registry.codec import encode_contract
from tests.adapter_folders import TEXT, VLM, plain
from tests.exporter_layouts import with_vision


@pytest.fixture
def contract_file(tmp_path):
    path = tmp_path / "base.json"
    path.write_bytes(encode_contract(TEXT))
    return path


def printed(folder, contract_file, *, markup=True, **options):
    out = io.StringIO()
    console = Console(file=out, width=200, markup=markup)
    good = inspect_folder(folder, contract_file, options=PublishOptions(**options), console=console)
    return good, out.getvalue()


@pytest.mark.parametrize("markup", [True, False])
def test_a_good_adapter_is_summed_up_with_its_rewrites_on_any_console(markup, tmp_path, contract_file):
    good, text = printed(plain().write(tmp_path / "tuned"), contract_file, markup=markup)

    assert good
    assert "tuned can be published" in text
    assert "rank 4, alpha 16, 14 modules" in text
    assert "\n  rewrite cast (28)\n" in text


def test_a_refusal_shows_value_limit_and_way_out(tmp_path, contract_file):
    good, text = printed(plain(rank=16).write(tmp_path / "tuned"), contract_file)

    assert not good
    row = next(line for line in text.splitlines() if "rank_too_large" in line)
    assert [cell.strip() for cell in row.split("│")][3:5] == ["16", "8"]
    assert "smaller rank" in text


def test_foreign_text_is_shown_as_it_is(tmp_path, contract_file):
    good, text = printed(plain(target_modules=["[red]x[/red]"]).write(tmp_path / "tuned"), contract_file)

    assert not good
    assert "[red]x[/red]" in text


def test_json_holds_the_same_as_data(tmp_path, contract_file, capsys):
    assert not inspect_folder(plain(rank=16).write(tmp_path / "tuned"), contract_file, as_json=True)
    data = json.loads(capsys.readouterr().out)

    assert data["publishable"] is False
    assert [(finding["code"], finding["limit"], finding["value"]) for finding in data["findings"]] == [("rank_too_large", 8, 16)]
    assert data["digest"] is None


def test_a_file_that_is_no_contract_is_a_wrong_request(tmp_path):
    (tmp_path / "base.json").write_text("{}")
    with pytest.raises(InvalidRequest):
        inspect_folder(plain().write(tmp_path / "tuned"), tmp_path / "base.json")


def test_an_archive_is_inspected_as_its_folder(tmp_path, contract_file):
    archive = shutil.make_archive(str(tmp_path / "tuned"), "gztar", plain().write(tmp_path / "folder"))
    _, of_folder = printed(tmp_path / "folder", contract_file)
    good, text = printed(Path(archive), contract_file)

    assert good
    assert text.splitlines()[-1] == of_folder.splitlines()[-1]


def test_a_broken_archive_is_a_finding(tmp_path, contract_file):
    (tmp_path / "tuned.zip").write_bytes(b"x")
    good, text = printed(tmp_path / "tuned.zip", contract_file)

    assert not good
    assert "archive_corrupt" in text


def test_strict_refuses_what_needs_rewriting(tmp_path, contract_file):
    good, text = printed(plain(alpha_pattern={"q_proj": 4}).write(tmp_path / "tuned"), contract_file, strict=True)

    assert not good
    assert "rewrite_needed" in text


def test_what_was_left_out_is_said_loudly(tmp_path):
    (tmp_path / "base.json").write_bytes(encode_contract(VLM))
    good, text = printed(with_vision(VLM).write(tmp_path / "tuned"), tmp_path / "base.json", drop=frozenset({"vision"}))

    assert good
    assert "lossy drop-vision (2)" in text
    assert "LOSSY" in text


def test_only_what_is_known_can_be_dropped():
    with pytest.raises(InvalidRequest) as caught:
        PublishOptions(drop=frozenset({"layers"}))

    assert (caught.value.limit, caught.value.value) == (["vision"], "layers")
