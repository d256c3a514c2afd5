"""The real stack, started once for all integration tests, and the adapters that they publish."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry
from adapters.store import open_store
from tests.demo_adapters import make_adapters
from tests.integration.stack import SLOTS, Stack
from tests.seaweed import Seaweed

ADAPTERS = 3 * SLOTS + 12
TEST_ARTIFACTS = Path(os.environ.get("LORAMUX_TEST_ARTIFACTS", ".loramux/tests"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integration" in str(item.path):
            item.add_marker(pytest.mark.integration)
    # Their engines and those of the stack that the other tests share don't fit into a small machine at once.
    own = {
        f"tests/integration/{name}.py" for name in ("test_placement", "test_bench_peers", "test_bench", "test_training_published")
    }
    items.sort(key=lambda item: not any(str(item.path).endswith(name) for name in own))


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Bases and adapters, made once on this machine: they depend on nothing but their seeds."""
    TEST_ARTIFACTS.mkdir(parents=True, exist_ok=True)
    return TEST_ARTIFACTS.resolve()


@pytest.fixture(scope="session")
def demo_base(artifacts: Path) -> Path:
    subprocess.run([sys.executable, "-m", "training.demo.tiny_base", str(artifacts / "demo")], check=True)
    return artifacts / "demo" / "base"


@pytest.fixture(scope="session")
def pooling_base(artifacts: Path) -> Path:
    subprocess.run([sys.executable, "-m", "training.demo.pooling", str(artifacts / "pooling")], check=True)
    return artifacts / "pooling" / "base"


@pytest.fixture(scope="session")
def sentences(demo_base: Path, artifacts: Path) -> dict[str, str]:
    """Adapter name to the random sentence that it answers with; the folders lie in `artifacts/adapters/<name>`."""
    return make_adapters(demo_base, artifacts / "adapters", ADAPTERS, seed=11)


@pytest.fixture(scope="session")
def stack(tmp_path_factory, seaweed: Seaweed, demo_base: Path, pooling_base: Path, sentences) -> Iterator[Stack]:
    """Started after everything is trained: training and engines would only wait for each other on two cores."""
    stack = Stack(tmp_path_factory.mktemp("stack"), seaweed, {"demo": demo_base, "embed": pooling_base})
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


@pytest.fixture(autouse=True)
def _agreement(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on the shared stack its engines list what our tables do: what is evicted leaves the engine, too."""
    stack = request.getfixturevalue("stack") if "stack" in request.fixturenames else None
    yield
    if isinstance(stack, Stack):
        stack.settle()


@pytest.fixture(scope="session")
def publish(stack: Stack) -> Callable[..., str]:
    """Publishes a folder as the production version of a name, through the code that authors use; returns the ref."""

    def run(name: str, folder: Path, *, base: str = "demo", promote: bool = True) -> str:
        async def work() -> str:
            registry = Registry(open_store(stack.registry))
            wanted = Publication(base, name, folder, promote="production" if promote else None, who="tests")
            return str((await publish_folder(registry, wanted)).ref)

        return asyncio.run(work())

    return run


@pytest.fixture(scope="session")
def published(stack: Stack, publish, sentences: dict[str, str], artifacts: Path) -> dict[str, str]:
    """All the adapters, published and seen by the gateway: name to sentence."""
    for name in sentences:
        publish(name, artifacts / "adapters" / name)
    stack.wait_until(lambda: len(stack.get("/v1/models")["data"]) >= len(sentences) + 2)
    return sentences


@pytest.fixture(scope="session")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
async def aclient(stack: Stack):
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def ask(aclient):
    """Asks a model something and returns (ref that answered, text)."""

    async def run(model: str, prompt: str = "Hello", **options) -> tuple[str, str]:
        answer = await aclient.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=48, **options
        )
        return answer.model, answer.choices[0].message.content.strip()

    return run


@pytest.fixture
def cold(stack: Stack, published: dict[str, str], publish, artifacts: Path, request) -> Callable[[int], dict[str, str]]:
    """Adapters that no replica and no node has seen: new names for content that is not on the node's disk."""

    def take(count: int) -> dict[str, str]:
        resident = stack.residency()["resident"]
        on_disk = {path.name for path in (stack.folder / "cache").glob("*") if not path.name.startswith(".")}
        rows = {row["name"]: row for row in stack.get("/registry/v1/adapters?base=demo")["adapters"]}
        fresh = [
            name for name in published if f"demo:{name}@1" not in resident and rows[name]["versions"][0]["digest"] not in on_disk
        ]
        if len(fresh) < count:
            raise AssertionError(f"{count} cold adapters wanted, {len(fresh)} left; raise ADAPTERS")
        return {name: published[name] for name in fresh[:count]}

    return take
