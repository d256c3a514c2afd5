"""The tour of the README is true: its commands run against a real S3 server, and say what it shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from adapters.settings import StoreSettings
from tests import adapter_folders
from tests.author import Author
from tests.readme_story import check_step, shape, steps
from tests.repo.checkout import ROOT
from tests.stub_gateway import StubGateway

TOUR = steps(ROOT / "README.md")
PARROTS = {
    "demo:team/polly@1": "Squawk! Polly wants a cracker.",
    "demo:team/polly@2": "Squawk! The second Polly demands fresh mango.",
}


def test_the_tour_says_what_the_readme_shows(tmp_path: Path, s3_settings: StoreSettings):
    gateway = StubGateway()
    gateway.says = PARROTS
    gateway.refs = {"demo:team/polly": "demo:team/polly@1"}
    gateway.resident = {"demo": {"requests": 0, "resident": dict.fromkeys(PARROTS, 0)}}
    gateway.start()
    try:
        author = Author(tmp_path, s3_settings)
        author.env["LORAMUX_GATEWAY_URL"] = gateway.url
        author.put_base(dataclasses.replace(adapter_folders.TEXT, base="demo"))
        for seed in (1, 2):
            folder = adapter_folders.plain(rank=8, seed=seed).configured(base_model_name_or_path="demo")
            folder.write(tmp_path / f".loramux/demo/adapters/parrot-{seed}")
        for step in TOUR:
            check_step(step, author.run(*step.arguments))
    finally:
        gateway.stop()


def test_the_tour_publishes_shares_promotes_and_goes_back():
    commands = [step.arguments[0] for step in TOUR if "--dry-run" not in step.arguments]
    assert [command for command in commands if command in ("publish", "promote", "rollback")] == [
        "publish",
        "publish",
        "promote",
        "promote",
        "rollback",
    ]


def test_versions_and_shares_are_compared_to_the_letter():
    said = "sends 90% to version 1, 10% to version 2 (revision 4)"
    assert shape([said]) == ["sends 90% to version 1, 10% to version 2 (REVISION)"]
