"""vLLM's own OpenAI server, which finds adapters in a folder (its filesystem LoRA resolver)."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import psutil

from loadtests.material import CONFIG, WEIGHTS, Adapter, Base
from loadtests.memory import processes_of
from loadtests.peers.asking import ask_once
from loadtests.peers.peer import CannotDo, NotPut, check_room
from loadtests.records import Tier
from loadtests.servers import free_port, process, wait_for_answer


class VLLM:
    """Adapters are on its disk from the start. A name that it has been asked for stays what it was."""

    name = "vllm"

    def __init__(self, url: str, base: Base, slots: int, folder: Path, pid: int | None = None) -> None:
        self.url = url
        self.base = base.id
        self._source = base.source
        self.pid = pid
        self._slots = slots
        self._folder = folder
        self._used: set[str] = set()

    def model(self, adapter: Adapter, *, alias: str | None = None) -> str:
        return adapter.name

    def version(self, adapter: Adapter) -> None:
        return None

    def adapter_of(self, path: str) -> None:
        return None

    def can_put(self, tier: Tier) -> bool:
        return tier != "remote"

    def needs_fresh(self, tier: Tier) -> bool:
        return tier == "disk"

    def put(self, adapters: Sequence[Adapter], tier: Tier) -> None:
        """`disk` holds once for each adapter. `engine` is asked for, and right until others are asked for."""
        names = [adapter.name for adapter in adapters]
        if tier == "disk":
            if again := next((name for name in names if name in self._used), None):
                raise NotPut(again, tier, "it was used before, and may be in the engine still")
        elif tier == "engine":
            check_room(adapters, self._slots)
            for adapter in adapters:
                ask_once(self.url, self.model(adapter))
        else:
            raise NotPut(names[0], tier, "this server has no store")
        self._used |= set(names)

    def add(self, adapter: Adapter) -> None:
        self._lay(adapter.name, adapter)

    def republish(self, adapter: Adapter, content: Adapter) -> None:
        self._lay(adapter.name, content)

    def promote(self, adapter: Adapter, content: Adapter) -> None:
        self._lay(adapter.name, content)

    def evict(self, adapter: Adapter, tier: Tier) -> None:
        raise CannotDo("vLLM's server gives an adapter up only together with its name")

    def loads(self) -> None:
        return None

    def processes(self) -> Mapping[str, Sequence[psutil.Process]]:
        return processes_of(self.pid, "server") if self.pid else {}

    def _lay(self, name: str, content: Adapter) -> None:
        """The resolver takes only adapters whose configuration names the base as the server was given it."""
        making = Path(mkdtemp(prefix=".laying-", dir=self._folder))
        config = json.loads((content.folder / CONFIG).read_text()) | {"base_model_name_or_path": self._source}
        (making / CONFIG).write_text(json.dumps(config))
        shutil.copyfile(content.folder / WEIGHTS, making / WEIGHTS)
        shutil.rmtree(self._folder / name, ignore_errors=True)
        making.rename(self._folder / name)


@contextmanager
def started(base: Base, engine: Mapping[str, Any], folder: Path) -> Iterator[VLLM]:
    """Raises NotStarted."""
    with TemporaryDirectory(prefix="loramux-bench-vllm-") as adapters:
        port = free_port()
        place = ["--host", "127.0.0.1", "--port", str(port)]
        served = ["--model", base.source, "--served-model-name", base.id]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *served, *place, *flags_of(engine)]
        environment = {
            **base.environment,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_PLUGINS": "lora_filesystem_resolver,loramux_wait_asleep",
            "VLLM_LORA_RESOLVER_CACHE_DIR": adapters,
        }
        with process(command, environment, log=folder / "server.log") as running:
            url = f"http://127.0.0.1:{port}"
            wait_for_answer(url, base.id, running)
            yield VLLM(url, base, engine["max_loras"], Path(adapters), running.pid)


def flags_of(engine: Mapping[str, Any]) -> list[str]:
    """Engine arguments as the server's command line has them."""
    return [flag for key, value in engine.items() for flag in _flag(key.replace("_", "-"), value)]


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
