"""Reading adapters ahead, beside the engine's loop: a door of its own into each worker (vLLM 0.29).

vLLM reads, checks and pins an adapter inside its loop, while every running stream waits. Here that part runs in a thread of the
worker: `Door` takes requests on a socket of this host, `Staging` keeps what was read until the engine's own `add_lora` asks for
it, which then has nothing left to do but copy. Whatever was not staged is read by the engine as ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from serve_app.engine.layers import misfits

logger = logging.getLogger(__name__)

READERS = 4
STAGED_AT_ONCE = 2
BUFFER_BYTES = 32 * 2**20  # torch keeps pinned buffers for the next taker by powers of two
_HEADER = struct.Struct("<Q")
ANOTHER_BASE = "its shapes are of another base"
SHORT = "the adapter's file is shorter than its header says"


class StageRequest(msgspec.Struct, frozen=True):
    """An adapter to read ahead: its name and number in the engine, and the folder with its files."""

    name: str
    int_id: int
    path: str


class StageReply(msgspec.Struct, frozen=True):
    """`error` is empty when the adapter is staged, else the class of what went wrong; `text` is for logs: it may hold paths."""

    error: str = ""
    text: str = ""


class StagingFailed(Exception):
    """The worker could not read the adapter. `kind` is the class of its error; its text may name paths."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


async def stage(doors: list[str], request: StageRequest) -> None:
    """Has every worker read the adapter; they do so at the same time. Raises StagingFailed, OSError when a door is shut."""
    for reply in await asyncio.gather(*(_knock(door, request) for door in doors)):
        if reply.error:
            raise StagingFailed(reply.error, reply.text)


async def _knock(door: str, request: StageRequest) -> StageReply:
    reader, writer = await asyncio.open_unix_connection(door)
    try:
        writer.write(msgspec.json.encode(request) + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise ConnectionResetError("the engine's worker went away")
    return msgspec.json.decode(line, type=StageReply)


class AdapterFile:
    """A safetensors file, read whole into a few buffers; its tensors are views of them. Stands for `safetensors.safe_open`.

    Buffers are pinned where the device copies from pinned memory: nothing is copied on the way to the device but once, and a
    few buffers of one size are reserved, and used again, where vLLM would reserve one for each tensor.
    """

    def __init__(self, path: str | Path, framework: str = "pt", device: str = "cpu") -> None:
        self._path = path
        self._tensors: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with open(self._path, "rb", buffering=0) as file:
            self._tensors = _read_tensors(file.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Any:
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tensors of a file: those between the bytes `start` and `end`, counted from the end of the header."""

    start: int
    end: int
    names: tuple[str, ...]


def cut(offsets: dict[str, tuple[int, int]], piece_bytes: int) -> list[Piece]:
    """The tensors in pieces of at most `piece_bytes`; one that is larger has a piece of its own. `offsets` are start and end."""
    pieces: list[Piece] = []
    names: list[str] = []
    start = end = 0
    for name, (begins, ends) in sorted(offsets.items(), key=lambda row: row[1]):
        if names and ends - start > piece_bytes:
            pieces.append(Piece(start, end, tuple(names)))
            names = []
        start = start if names else begins
        names.append(name)
        end = ends
    return [*pieces, Piece(start, end, tuple(names))] if names else pieces


def read_header(fd: int) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's tensors begin, and what it says of each.

    Raises EOFError for a file that is shorter than it says: damage must not look like a lack of memory. ValueError for one that
    is no safetensors file.
    """
    (header_bytes,) = _HEADER.unpack(_exactly(os.pread(fd, _HEADER.size, 0), _HEADER.size))
    begin, file_bytes = _HEADER.size + header_bytes, os.fstat(fd).st_size
    if begin > file_bytes:
        raise EOFError(SHORT)
    header = json.loads(os.pread(fd, header_bytes, _HEADER.size))
    header.pop("__metadata__", None)
    if any(begin + about["data_offsets"][1] > file_bytes for about in header.values()):
        raise EOFError(SHORT)
    return begin, header


def _exactly(data: bytes, count: int) -> bytes:
    if len(data) < count:
        raise EOFError(SHORT)
    return data


def _read_tensors(fd: int) -> dict[str, Any]:
    begin, header = read_header(fd)
    pieces = cut({name: tuple(about["data_offsets"]) for name, about in header.items()}, BUFFER_BYTES)
    # copying out of the page cache is bound by one core, so several share it
    with ThreadPoolExecutor(READERS) as pool:
        buffers = pool.map(lambda piece: _read_piece(fd, begin, piece, whole=len(pieces) > 1), pieces)
        return {name: view for piece, buffer in zip(pieces, buffers, strict=True) for name, view in _views(piece, buffer, header)}


def _read_piece(fd: int, begin: int, piece: Piece, *, whole: bool) -> Any:
    """The piece's bytes, in a buffer that is as large as all others if `whole`. Raises EOFError for a file that is cut off."""
    size = piece.end - piece.start
    buffer = _buffer(max(size, BUFFER_BYTES) if whole else size)
    view, at = memoryview(buffer.numpy())[:size], begin + piece.start
    while view:
        count = os.preadv(fd, [view], at)
        if not count:
            raise EOFError(SHORT)
        view, at = view[count:], at + count
    return buffer


def _views(piece: Piece, buffer: Any, header: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # what a published adapter can hold
    for name in piece.names:
        about = header[name]
        start, end = (offset - piece.start for offset in about["data_offsets"])
        yield name, buffer[start:end].view(types[about["dtype"]]).view(about["shape"])


def _buffer(size_bytes: int) -> Any:
    import torch
    from vllm.utils.torch_utils import PIN_MEMORY

    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=PIN_MEMORY)


def reserve(size_bytes: int) -> int:
    """Has torch keep pinned buffers for so many bytes of adapters, and says for how many it does.

    Pinning new memory takes a millisecond for each 1.4 MB and holds up whatever the device does meanwhile; memory that was
    pinned once is kept by torch. Nothing is reserved where nothing is pinned.
    """
    from vllm.utils.torch_utils import PIN_MEMORY

    if not PIN_MEMORY:
        return 0
    buffers = [_buffer(BUFFER_BYTES) for _ in range(-(-size_bytes // BUFFER_BYTES))]
    return len(buffers) * BUFFER_BYTES


class OfAnotherBase(ValueError):
    """The adapter's shapes are not this base's. The text names the first module that differs."""


class Staging:
    """What was read ahead, by integer id, until the engine takes it or forgets it. `manager` is vLLM's WorkerLoRAManager. An
    adapter of another base is refused, read ahead or not: OfAnotherBase."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._inner = manager, manager._adapter_manager
        self._read, self._remove, self._merge = (
            manager._load_adapter,
            manager.remove_adapter,
            self._inner._create_merged_loras_inplace,
        )
        self._staged: dict[int, Any] = {}
        self._merged: set[int] = set()
        manager._load_adapter = self._take
        manager.remove_adapter = self._forget
        self._inner._create_merged_loras_inplace = self._merge_once

    def stage(self, request: StageRequest) -> None:
        """Reads and checks the adapter as the engine would. Raises what vLLM raises."""
        adapter = self._load(lora_request(request))
        if not self._inner._is_moe:  # experts are cut up for this worker's share: better where vLLM does it
            self._merge(adapter)
            self._merged.add(request.int_id)
        self._staged[request.int_id] = adapter

    def ids(self) -> list[int]:
        return sorted(self._staged)

    def _load(self, request: Any) -> Any:
        adapter = self._read(request)
        if found := misfits(self._inner, adapter):
            raise OfAnotherBase(f"{ANOTHER_BASE}: {found[0]}")
        return adapter

    def _take(self, request: Any) -> Any:
        staged = self._staged.pop(request.lora_int_id, None)
        return self._load(request) if staged is None else staged

    def _merge_once(self, adapter: Any) -> None:
        if adapter.id in self._merged:
            self._merged.discard(adapter.id)
        else:
            self._merge(adapter)

    def _forget(self, int_id: int) -> bool:
        self._staged.pop(int_id, None)
        self._merged.discard(int_id)
        return self._remove(int_id)


def lora_request(request: StageRequest) -> Any:
    """vLLM's own value for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=request.name, lora_int_id=request.int_id, lora_path=request.path)


class Door:
    """Listens on a Unix socket in a folder that only this user can enter; each request is answered when it is done."""

    def __init__(self, path: Path, work: Callable[[StageRequest], None], prepare: Callable[[], None]) -> None:
        self._work = work
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._threads = ThreadPoolExecutor(STAGED_AT_ONCE, thread_name_prefix="staging", initializer=prepare)
        threading.Thread(target=self._listen, name="staging-door", daemon=True).start()

    def _listen(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            self._threads.submit(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rwb") as stream:
                for line in _lines(stream):
                    stream.write(msgspec.json.encode(self._answer(line)) + b"\n")
                    stream.flush()
        except OSError:
            logger.debug("whoever asked for an adapter went away", exc_info=True)

    def _answer(self, line: bytes) -> StageReply:
        try:
            self._work(msgspec.json.decode(line, type=StageRequest))
        except Exception as error:
            logger.warning("an adapter could not be read ahead", exc_info=True)
            return StageReply(type(error).__name__, str(error))
        return StageReply()


def _lines(stream: Any) -> Iterator[bytes]:
    while line := stream.readline():
        yield line
