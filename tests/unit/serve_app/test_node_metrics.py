"""Our metrics through Ray's agent: under our names, without Ray's labels, one process apart from another."""

from __future__ import annotations

import pytest

from adapters.errors import EngineUnavailable
from adapters.metrics import METRICS
from serve_app import node_metrics

AGENT = """\
# HELP ray_loramux_store_calls_total Store calls that ended.
# TYPE ray_loramux_store_calls_total counter
ray_loramux_store_calls_total{Component="core_worker",NodeAddress="192.0.2.2",SessionName="session_1",Version="2.60.0",\
WorkerId="7f37e011738f036b63c6",method="get",otel_scope_name="ray.telemetry",otel_scope_version="",result="ok"} 2.0
ray_loramux_store_calls_total{Component="core_worker",NodeAddress="192.0.2.2",SessionName="session_1",Version="2.60.0",\
WorkerId="0ff91d703111f1f5c441",method="get",otel_scope_name="ray.telemetry",otel_scope_version="",result="a \\"b\\", c"} 1.0
# HELP ray_loramux_registry_generation How often.
# TYPE ray_loramux_registry_generation gauge
ray_loramux_registry_generation 7.0
# HELP ray_node_cpu_count Cores.
# TYPE ray_node_cpu_count gauge
ray_node_cpu_count{NodeAddress="192.0.2.2"} 2.0
ray_serve_num_loramux_requests{NodeAddress="192.0.2.2"} 2.0
"""


def test_only_our_lines_pass_and_no_label_of_rays() -> None:
    assert list(node_metrics.ours(AGENT)) == [
        "# HELP loramux_store_calls_total Store calls that ended.",
        "# TYPE loramux_store_calls_total counter",
        'loramux_store_calls_total{process="7f37e011738f",method="get",result="ok"} 2.0',
        'loramux_store_calls_total{process="0ff91d703111",method="get",result="a \\"b\\", c"} 1.0',
        "# HELP loramux_registry_generation How often.",
        "# TYPE loramux_registry_generation gauge",
        "loramux_registry_generation{} 7.0",
    ]


async def test_an_agent_that_does_not_answer_is_an_error_without_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "_agents_address", lambda: "http://127.0.0.1:1/metrics")
    with pytest.raises(EngineUnavailable) as caught:
        await node_metrics.node_metrics()
    assert "127.0.0.1" not in str(caught.value)


async def test_a_node_without_metrics_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise LookupError

    monkeypatch.setattr(node_metrics, "_agents_address", nowhere)
    with pytest.raises(EngineUnavailable):
        await node_metrics.node_metrics()


def test_every_metric_has_a_shape_that_ray_takes() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert not set(metric.labels) & {"process", "le", *node_metrics._RAYS_OWN}, metric.name
