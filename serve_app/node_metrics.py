"""What all processes of this node measured, from the node's own Ray agent: the `loramux_*` part, under our own names."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

from adapters.errors import EngineUnavailable

TIMEOUT_S = 5.0
RETRY_AFTER_S = 5.0

_OURS = re.compile(r"ray_(loramux_\w+)(?:\{(.*)\})? (.+)")
_COMMENT = re.compile(r"# (HELP|TYPE) ray_(loramux_\w+) (.*)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RAYS_OWN = frozenset({"Component", "NodeAddress", "SessionName", "Version", "JobId"})
_PROCESS = "WorkerId"
_PROCESS_CHARS = 12


async def node_metrics() -> bytes:
    """The node's metrics in Prometheus' text format. Raises EngineUnavailable if the agent doesn't answer."""
    try:
        text = await asyncio.to_thread(_agents_text)
    except (OSError, urllib.error.URLError, LookupError) as error:
        raise EngineUnavailable("the node's metrics agent does not answer", retry_after_s=RETRY_AFTER_S) from error
    return "".join(f"{line}\n" for line in ours(text)).encode()


def ours(text: str) -> Iterator[str]:
    """Our lines of an agent's text, without Ray's prefix and labels; `process` tells one process' numbers from another's."""
    for line in text.splitlines():
        if comment := _COMMENT.fullmatch(line):
            yield f"# {comment[1]} {comment[2]} {comment[3]}"
        elif sample := _OURS.fullmatch(line):
            yield f"{sample[1]}{{{','.join(_labels(sample[2] or ''))}}} {sample[3]}"


def _labels(text: str) -> Iterator[str]:
    for name, value in _LABEL.findall(text):
        if name == _PROCESS:
            yield f'process="{value[:_PROCESS_CHARS]}"'
        elif name not in _RAYS_OWN and not name.startswith("otel_"):
            yield f'{name}="{value}"'


def _agents_text() -> str:
    # a proxy of the environment has no way to this address
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(_agents_address(), timeout=TIMEOUT_S) as answer:
        return answer.read().decode()


def _agents_address() -> str:
    """Where this node's agent shows its metrics. Raises LookupError. Asked anew each time: an agent that was restarted has
    another port."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = next((node for node in ray.nodes() if node["NodeID"] == here), None)
    if node is None or not node.get("MetricsExportPort"):
        raise LookupError("this node shows no metrics")
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
