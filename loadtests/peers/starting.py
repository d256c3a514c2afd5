"""Servers by their names: started here over a store, or attached where they run already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from loadtests.material import SLOTS, Base
from loadtests.peers import loramux, stock, vllm
from loadtests.peers.peer import Peer
from loadtests.servers import NotStarted
from loadtests.shaping import Store

Start = Callable[[Base, Store, Mapping[str, Any], Path], AbstractContextManager[Peer]]

STARTS: dict[str, Start] = {
    "loramux": loramux.started,
    "stock": lambda base, store, engine, folder: stock.started("stock", base, store, engine, folder, tuned=False),
    "stock-tuned": lambda base, store, engine, folder: stock.started("stock-tuned", base, store, engine, folder, tuned=True),
    "vllm": lambda base, store, engine, folder: vllm.started(base, engine, folder),
}
ATTACHABLE = ("loramux", "stock", "stock-tuned")


@contextmanager
def start(name: str, base: Base, store: Store, engine: Mapping[str, Any], folder: Path) -> Iterator[Peer]:
    """The server that is called `name` with no adapter yet, until the end of the block. All get the same engine arguments.

    Its settings and its log stay in `folder`. Raises NotStarted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with STARTS[name](base, store, engine, folder) as peer:
        yield peer


def attached(name: str, url: str, base: str, *, slots: int = SLOTS, adapters_at: str | None = None) -> Peer:
    """A server that somebody else runs at `url`. Of LoraMux everything works but its processes. Stock takes adapters where
    `adapters_at` says that it looks for them (`s3://bucket/prefix`), and keeps `slots` of them at once. Raises NotStarted for
    servers that can't be attached."""
    if name not in ATTACHABLE:
        raise NotStarted(f"{name} can't be attached, only {', '.join(ATTACHABLE)}")
    url = url.rstrip("/").removesuffix("/v1")
    if name == "loramux":
        return loramux.LoraMux(url, base)
    return stock.Stock(name, url, base, slots, stock.adapter_path(adapters_at) if adapters_at else None)
