"""A spec handed to a Ray cluster, by Ray's own client; what answers is a stub of the dashboard's jobs interface."""

from __future__ import annotations

import io
import json
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

from adapters.errors import InvalidRequest
from tests.repo.checkout import ROOT
from training.skyrl.submit import ENTRY_POINT, NotSubmitted, submit
from training.spec import BadTrainSpec, TrainSpec

HYPERPOD = TrainSpec.load(ROOT / "training" / "specs" / "hyperpod.yaml")
SCHEME = """
from ray.dashboard.modules.dashboard_sdk import ClusterInfo


def get_job_submission_client_cluster_info(address, **named):
    return ClusterInfo(address="http://{0}", cookies={{"ray_session": address}}, headers={{"X-Seen": "by the module"}})
"""


class Cluster:
    """Takes packages and jobs, and remembers them."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.package = b""
        cluster = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/api/version"
                body = {"version": "4", "ray_version": ray.__version__, "ray_commit": "x", "session_name": "s"}
                self._say(200 if known else 404, body if known else {})

            def do_PUT(self) -> None:
                cluster.package = self._read()
                self._say(200, {})

            def do_POST(self) -> None:
                cluster.headers.append(dict(self.headers))
                cluster.jobs.append(json.loads(self._read()))
                self._say(200, {"job_id": "raysubmit_1", "submission_id": "raysubmit_1"})

            def _read(self) -> bytes:
                return self.rfile.read(int(self.headers["Content-Length"]))

            def _say(self, status: int, body: dict[str, Any]) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def files(self) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(self.package)) as package:
            return {name: package.read(name) for name in package.namelist()}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.server.shutdown()
    cluster.server.server_close()


@pytest.fixture
def scheme(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed module of the address scheme."""
    (tmp_path / "sagemaker_ray.py").write_text(SCHEME.format(cluster.host))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("sagemaker_ray", None)


def test_the_job_trains_from_the_spec_that_travels_with_our_source(cluster: Cluster):
    submitted = submit(HYPERPOD, f"http://{cluster.host}")
    (job,) = cluster.jobs
    assert submitted.job_id == "raysubmit_1"
    assert job["entrypoint"] == ENTRY_POINT
    assert job["metadata"] == {"run": "maze-grpo", "spec_digest": HYPERPOD.digest()}
    assert [one.partition("==")[0] for one in job["runtime_env"]["pip"]["packages"]] == ["msgspec", "obstore"]
    files = cluster.files()
    travelled = {name for name in files if name.endswith("experiment.py")}
    assert len(travelled) == 1


def test_the_spec_that_travels_is_the_one_that_was_submitted(cluster: Cluster, tmp_path: Path):
    submit(HYPERPOD, f"http://{cluster.host}")
    (text,) = (data for name, data in cluster.files().items() if name.endswith("spec.yaml"))
    (tmp_path / "spec.yaml").write_bytes(text)
    assert TrainSpec.load(tmp_path / "spec.yaml") == HYPERPOD


def test_only_source_travels_no_weights(cluster: Cluster):
    submit(HYPERPOD, f"http://{cluster.host}")
    assert len(cluster.package) < 4 * 2**20
    assert not [name for name in cluster.files() if name.endswith((".safetensors", ".pyc"))]


def test_an_address_goes_to_rays_client_as_it_is_and_to_the_module_of_its_scheme(cluster: Cluster, scheme: None):
    submitted = submit(HYPERPOD, "sagemaker_ray://training/maze")
    assert submitted.address == "sagemaker_ray://training/maze"
    assert cluster.headers[0]["X-Seen"] == "by the module"
    assert "training/maze" in cluster.headers[0]["Cookie"]


def test_a_scheme_whose_module_is_missing_is_refused_with_what_has_it():
    with pytest.raises(InvalidRequest, match=r"sagemaker_ray:// .*toolkit-for-ray-on-sagemaker-ai.*loramux\[sagemaker\]"):
        submit(HYPERPOD, "sagemaker_ray://training/maze")


def test_a_cluster_that_is_not_there_is_said_to_be(cluster: Cluster):
    cluster.server.shutdown()
    cluster.server.server_close()
    with pytest.raises(NotSubmitted, match="did not take the job"):
        submit(HYPERPOD, f"http://{cluster.host}")


def test_a_spec_that_would_break_is_refused_before_anybody_is_asked(cluster: Cluster):
    broken = TrainSpec.from_values(HYPERPOD.as_dict(), ["trainer.ckpt_path=s3://bucket/x"])
    with pytest.raises(BadTrainSpec, match="ckpt_path"):
        submit(broken, f"http://{cluster.host}")
    assert not cluster.jobs
