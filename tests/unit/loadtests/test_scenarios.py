"""The scenarios that come with LoraMux, and what is said of a file that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from loadtests import scenario, workload
from loadtests.material import engine_for
from loadtests.running.changes import steps_of
from loadtests.running.phase import adapter_of
from loadtests.running.shelf import Shelf, needed, used
from loadtests.scenario import BadScenario, Scenario
from tests.unit.loadtests import scripted

PROMISED = {
    "beside",
    "burst-many",
    "burst-one",
    "capacity",
    "cold-ladder",
    "cold-storm",
    "faulty-store",
    "newcomers",
    "promote",
    "one-gpu",
    "publish-storm",
    "soak",
    "two-minutes",
}
SHIPPED = scenario.names()


def test_the_scenarios_that_are_promised_are_here():
    assert set(SHIPPED) >= PROMISED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_scenario_is_called_as_its_file_and_says_what_it_is_about(name: str):
    loaded = scenario.load(name)
    assert loaded.name == name
    assert loaded.about.strip().endswith(".") and loaded.aims


@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_shipped_scenario_puts_into_the_engine_fits_there(name: str):
    loaded = scenario.load(name)
    slots = engine_for(loaded.pools, loaded.engine)["max_cpu_loras"]
    for phase in loaded.phases:
        assert sum(loaded.pools[pool].count for pool, tier in phase.put.items() if tier == "engine") <= slots


@pytest.mark.parametrize("name", SHIPPED)
def test_every_phase_of_a_shipped_scenario_has_peers_that_run(name: str):
    loaded = scenario.load(name)
    assert all(set(phase.only) & set(loaded.peers) for phase in loaded.phases)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_pool_of_a_shipped_scenario_is_used_and_aims_name_its_phases(name: str):
    loaded = scenario.load(name)
    assert used(loaded.phases) == set(loaded.pools)
    phases = {phase.name: {load.name for load in phase.loads} | {"*"} for phase in loaded.phases}
    for aim in loaded.aims:
        for key in aim.figure.replace(" / ", " - ").split(" - "):
            peer, phase, load, _ = key.split("/", 3)
            assert peer in scenario.PEERS and load in phases[phase], key


@pytest.mark.parametrize("name", SHIPPED)
def test_a_run_has_an_adapter_for_every_request_and_every_change(name: str):
    loaded = scenario.load(name)
    shelf = Shelf(loaded.pools, scripted.ScriptedMaterial(needed(loaded)).pools)
    for phase in loaded.phases:
        steps = steps_of(phase.changes, shelf)
        asked = [adapter_of(one, shelf, steps) for one in workload.plan(phase, loaded.pools, loaded.seed)]
        assert len(asked) > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"romds": 2}, "mine.yaml: romds: Extra inputs are not permitted"),
        ({"pools": {"cold": {"count": 0}}}, "mine.yaml: pools.cold.count: "),
        ({"peers": ["nobody"]}, "no such peer: nobody"),
        ({"pools": {}}, "phase ask names pools that the scenario does not have: cold"),
    ],
)
def test_a_file_that_is_no_scenario_is_named_with_its_field(tmp_path: Path, change: dict, said: str):
    document = scripted.scenario().model_dump(mode="json") | change
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(BadScenario) as refusal:
        scenario.load(str(tmp_path / "mine.yaml"))
    assert said in str(refusal.value)


def test_what_a_run_writes_down_of_its_scenario_is_a_scenario():
    loaded = scenario.load("beside")
    assert Scenario.model_validate_json(loaded.model_dump_json(indent=1)) == loaded
