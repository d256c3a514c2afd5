"""The publisher of a spec, and the command that publishes what somebody else's run exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

import training.publishing.publisher as publisher_module
from adapters.errors import InvalidRequest
from tests.exported_runs import BASE, NAME, Told, export, saved
from training.publishing import Judged
from training.publishing.command import publish
from training.publishing.of_spec import evaluation_of, publisher_of
from training.publishing.origin import weights_digest
from training.spec import TrainSpec

SAMPLED = "eval/easy-64/sampled/solve_rate"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "loramux.yaml"
    file.write_text(yaml.safe_dump({"registry": {"url": f"file://{tmp_path}/registry"}}))
    return file


def spec(*overrides: str) -> TrainSpec:
    return TrainSpec.from_values({}, overrides)


NAMED = (f"loramux.publish.base={BASE}", f"loramux.publish.name={NAME}")


class TestSpec:
    def test_without_a_name_nothing_is_published(self, config):
        assert publisher_of(spec(), "run", config=config) is None

    def test_a_name_without_a_base_is_refused_by_key(self, config):
        with pytest.raises(InvalidRequest, match=r"loramux\.publish\.base"):
            publisher_of(spec(NAMED[1]), "run", config=config)

    def test_a_run_without_a_registry_does_not_begin(self, tmp_path):
        (tmp_path / "empty.yaml").write_text("{}\n")
        with pytest.raises(InvalidRequest, match="no registry"):
            publisher_of(spec(*NAMED), "run", config=tmp_path / "empty.yaml")

    def test_a_registry_of_the_specs_own_needs_no_settings(self, tmp_path):
        (tmp_path / "empty.yaml").write_text("{}\n")
        url = f"loramux.publish.registry=file://{tmp_path}/other"
        publisher = publisher_of(spec(*NAMED, url), "run", config=tmp_path / "empty.yaml")
        assert publisher is not None
        publisher.offer(saved(export(tmp_path, 1), 1.0))
        assert publisher.close(20) == ()
        assert (tmp_path / "other" / "registry.json").exists()

    def test_the_gate_is_the_specs(self, tmp_path, config):
        told = Told()
        publisher = publisher_of(spec(*NAMED, "loramux.publish.min_solve_rate=0.8"), "run", told, config=config)
        assert publisher is not None
        publisher.offer(saved(export(tmp_path, 1), 0.7))
        assert told.wait(Judged).codes == ("below_minimum",)
        publisher.close(20)

    def test_the_manifest_names_the_weights_of_the_base(self, tmp_path, config):
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "model.safetensors").write_bytes(b"weights")
        told = Told()
        model = f"trainer.policy.model.path={tmp_path}/base"
        publisher = publisher_of(spec(*NAMED, model), "run", told, config=config)
        assert publisher is not None
        publisher.offer(saved(export(tmp_path, 1), 1.0))
        assert publisher.close(20) == ()
        (file,) = (tmp_path / "registry").glob("adapters/*/*/versions/1/manifest.json")
        assert json.loads(file.read_text())["source"]["base_digest"] == weights_digest(tmp_path / "base")

    def test_a_base_that_is_no_local_folder_is_left_unnamed(self, tmp_path, config):
        publisher = publisher_of(spec(*NAMED, "trainer.policy.model.path=Qwen/Qwen3-VL-8B"), "run", config=config)
        assert publisher is not None
        publisher.offer(saved(export(tmp_path, 1), 1.0))
        assert publisher.close(20) == ()

    def test_how_a_rate_is_measured_is_the_set_the_decoding_and_the_rules(self):
        how = evaluation_of(spec("generator.sampling_params.temperature=0.7"), SAMPLED)
        assert (how["set"], how["set_digest"], how["decoding"], how["temperature"]) == (
            "easy-64",
            "23221045659a4078",
            "sampled",
            0.7,
        )
        assert how["maze"]["size"] == 9

    def test_another_temperature_is_another_measure_and_another_learning_rate_is_not(self):
        cooler = spec("generator.sampling_params.temperature=0.7")
        faster = spec("trainer.policy.optimizer_config.lr=0.001")
        assert evaluation_of(cooler, SAMPLED) != evaluation_of(spec(), SAMPLED)
        assert evaluation_of(faster, SAMPLED) == evaluation_of(spec(), SAMPLED)

    @pytest.mark.parametrize("metric", ["loss", "eval/other/sampled/solve_rate", "eval/easy-64", "eval/easy-64/beam/solve_rate"])
    def test_of_a_metric_of_another_form_nothing_is_said(self, metric):
        assert evaluation_of(spec(), metric) == {}


class TestCommand:
    @pytest.fixture(autouse=True)
    def _hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(publisher_module, "LOOK_AGAIN_S", 0.0)

    def run(self, config: Path, export_path: Path, *options: str) -> Any:
        app = typer.Typer()
        app.command()(publish)
        where = ["--base", BASE, "--name", NAME, "--config", str(config)]
        return CliRunner().invoke(app, [str(export_path), *where, *options], terminal_width=200)

    def test_publishes_what_is_no_version_yet(self, config, tmp_path):
        for step in (1, 2):
            export(tmp_path / "exports", step)
        done = json.loads(self.run(config, tmp_path / "exports", "--json").stdout)
        assert done["versions"] == [f"{BASE}:{NAME}@1", f"{BASE}:{NAME}@2"]
        again = json.loads(self.run(config, tmp_path / "exports", "--json").stdout)
        assert [row["created"] for row in again["events"]] == [False, False]

    def test_says_for_people_what_became_of_each_step_and_what_to_do_next(self, config, tmp_path):
        export(tmp_path / "exports", 1)
        said = self.run(config, tmp_path / "exports", "--alias", "canary").output
        assert f"step 1: {BASE}:{NAME}@1" in said
        assert "canary stays: `eval/easy-64/sampled/solve_rate` is not known" in said
        assert f"next: loramux show {BASE}:{NAME}" in said

    def test_ends_with_1_where_something_was_refused(self, config, tmp_path):
        (export(tmp_path, 1) / "adapter_config.json").write_text('{"peft_type": "IA3"}')
        done = self.run(config, tmp_path)
        assert done.exit_code == 1
        assert "step 1: refused" in done.output

    def test_a_folder_that_is_not_there_is_an_error(self, config, tmp_path):
        done = self.run(config, tmp_path / "nothing")
        assert done.exit_code == 1
        assert "no such folder" in done.output

    @pytest.mark.parametrize("options", [("--alias", "v7"), ("--alias", "Production")])
    def test_a_name_that_is_none_is_wrong_usage(self, config, tmp_path, options):
        assert self.run(config, tmp_path, *options).exit_code == 2
