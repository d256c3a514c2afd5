"""Somebody with a settings file and the command `loramux`, in process: what it prints and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from typer.testing import CliRunner

from adapters.cli import app
from adapters.registry import Registry
from adapters.settings import StoreSettings
from adapters.store import open_store
from adapters.types import BaseContract, Head


@contextlib.contextmanager
def _all_warm() -> Iterator[None]:
    begin = Registry.begin_move

    async def begun_and_finished(registry: Registry, base: str, name: str, alias: str, *details: Any, **limits: Any) -> Head:
        head = await begin(registry, base, name, alias, *details, **limits)
        move = head.pending.get(alias)
        return head if move is None else await registry.finish_move(base, name, alias, move.id)

    with mock.patch.object(Registry, "begin_move", begun_and_finished):
        yield


class Author:
    """`run` and `json` are the command; `do` runs a coroutine on the registry behind its back.

    While `warm`, promotions find a gateway whose replicas have every version already; else there is no gateway.
    """

    def __init__(self, folder: Path, settings: StoreSettings | None = None, **sections: Any) -> None:
        self.folder = folder
        self.settings = settings or StoreSettings(url=f"file://{folder}/registry")
        self.env: dict[str, str] = {"LORAMUX_USER": "ann"}
        self.warm = True
        registry = self.settings.model_dump(mode="json", exclude_none=True)
        if self.settings.secret_access_key:
            registry["secret_access_key"] = self.settings.secret_access_key.get_secret_value()
        (folder / "loramux.yaml").write_text(yaml.safe_dump({"registry": registry, **sections}))

    def run(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        """Stdout and stderr together. Raises AssertionError for another exit code."""
        result = self.result(*arguments, stdin=stdin)
        assert result.exit_code == code, f"{result.exit_code}: {result.output}{result.exception!r}"
        return result.output

    def json(self, *arguments: str, code: int = 0) -> Any:
        """What stdout holds, which must be one document of JSON and nothing else."""
        result = self.result(*arguments, "--json")
        assert result.exit_code == code, f"{result.exit_code}: {result.output}{result.exception!r}"
        return json.loads(result.stdout)

    def refused(self, *arguments: str) -> dict[str, Any]:
        """The error of a command that must be refused, as `--json` tells it on stderr."""
        result = self.result(*arguments, "--json")
        assert result.exit_code == 1, f"{result.exit_code}: {result.output}{result.exception!r}"
        assert not result.stdout
        return json.loads(result.stderr)["error"]

    def result(self, *arguments: str, stdin: str | None = None) -> Any:
        with contextlib.chdir(self.folder), _all_warm() if self.warm else contextlib.nullcontext():
            return CliRunner().invoke(app, list(arguments), input=stdin, env=self.env, terminal_width=200)

    def do(self, work: Any) -> Any:
        """`work` is given the registry."""

        async def run() -> Any:
            found: Coroutine[Any, Any, Any] = work(Registry(open_store(self.settings)))
            return await found

        return asyncio.run(run())

    def put_base(self, contract: BaseContract) -> None:
        self.do(lambda registry: registry.put_base(contract))

    def head(self, name: str, base: str = "tiny/base") -> Head:
        return self.do(lambda registry: registry.head(base, name))
