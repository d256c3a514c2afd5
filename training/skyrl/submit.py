"""Hands a spec to SkyRL on a Ray cluster as a job. The address goes to Ray as it is: `http://host:8265`, `sagemaker_ray://...`.

What travels is our source and the spec, a few hundred kilobytes; SkyRL, the model and the GPUs are the cluster's.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from adapters.errors import InvalidRequest, LoraMuxError
from training.publishing import code_revision
from training.skyrl.overrides import check_skyrl
from training.spec import TrainSpec

SPEC = "spec.yaml"
ENTRY_POINT = f"python -m training.skyrl.experiment {SPEC}"
REVISION_VARIABLE = "LORAMUX_CODE_REVISION"
PACKAGES = ("adapters", "training")
SOURCES = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.safetensors", "weights", "results", ".*")

# What our source needs and SkyRL's environment lacks, in the versions that it is tested with.
NEEDED = ("msgspec", "obstore")

# Address schemes that Ray finds a module for, and who has it.
EXTRAS = {"sagemaker_ray": ("toolkit-for-ray-on-sagemaker-ai", "sagemaker")}


class NotSubmitted(LoraMuxError):
    """The cluster was not reached, or did not take the job."""

    code = "not_submitted"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that the cluster took; it runs on without us."""

    job_id: str
    address: str

    def logs_command(self) -> str:
        return f"ray job logs --address {self.address} --follow {self.job_id}"


def submit(spec: TrainSpec, address: str, *, client: Callable[[str], Any] | None = None) -> Submitted:
    """Raises BadTrainSpec for what SkyRL could not do, InvalidRequest for an address that nobody here knows how to reach, and
    NotSubmitted if the cluster does not take the job."""
    check_skyrl(spec)
    check_address(address)
    with tempfile.TemporaryDirectory(prefix="loramux-job-") as folder:
        stage(spec, Path(folder))
        try:
            jobs = (client or _client)(address)
            job_id = jobs.submit_job(
                entrypoint=ENTRY_POINT,
                runtime_env=runtime_env(Path(folder)),
                metadata={"run": spec.trainer.run_name, "spec_digest": spec.digest()},
            )
        except (ConnectionError, RuntimeError) as error:
            raise NotSubmitted(f"the cluster did not take the job: {error}", value=address) from error
    return Submitted(job_id, address)


def check_address(address: str) -> None:
    """Raises InvalidRequest for a scheme whose module is not installed, and says what has it."""
    scheme, found, _ = address.partition("://")
    if not found or scheme in ("http", "https") or importlib.util.find_spec(scheme) is not None:
        return
    package, extra = EXTRAS.get(scheme, (None, None))
    hint = f"install {package}, the extra `loramux[{extra}]`" if package else "Ray knows http, https and modules of that name"
    raise InvalidRequest(f"addresses with {scheme}:// need a module that is not installed", value=address, hint=hint)


def runtime_env(folder: Path) -> dict[str, Any]:
    return {
        "working_dir": str(folder),
        "pip": [f"{name}=={metadata.version(name)}" for name in NEEDED],
        "env_vars": {"PYTHONUNBUFFERED": "1", REVISION_VARIABLE: code_revision() or ""},
    }


def stage(spec: TrainSpec, folder: Path) -> None:
    """Our source and the spec, as the job finds them in its working directory."""
    for package in PACKAGES:
        shutil.copytree(SOURCES / package, folder / package, ignore=LEFT_OUT)
    (folder / SPEC).write_text(spec.to_yaml())


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)
