"""Stock Ray Serve LLM with LoRA from S3, as its guide sets it up: the peer of the load tests. All comes in the environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

PASSED_ON = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "VLLM_CPU_KVCACHE_SPACE",
)


def main() -> None:
    replicas = int(os.environ["BENCH_REPLICAS"])
    ray.init(address="local", num_cpus=max(6 + 2 * replicas, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)
    on_cpu = os.environ["BENCH_ACCELERATOR"] == "cpu"
    engine = json.loads(os.environ["BENCH_ENGINE"])
    config = LLMConfig(
        model_loading_config={"model_id": os.environ["BENCH_BASE_ID"], "model_source": os.environ["BENCH_BASE"]},
        lora_config={
            "dynamic_lora_loading_path": f"s3://{os.environ['BENCH_BUCKET']}/lora",
            "max_num_adapters_per_replica": engine["max_loras"],
        },
        engine_kwargs=engine,
        deployment_config={"autoscaling_config": {"min_replicas": replicas, "max_replicas": replicas}},
        placement_group_config={"bundles": [{"CPU": 1} if on_cpu else {"CPU": 1, "GPU": 1}]},
        runtime_env={"env_vars": {name: os.environ[name] for name in PASSED_ON if name in os.environ}},
        experimental_configs={"stream_batching_interval_ms": 0} if os.environ["BENCH_TUNED"] == "1" else {},
    )
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    Path(os.environ["BENCH_METRICS_FILE"]).write_text(address)
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["BENCH_PORT"])})
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)


if __name__ == "__main__":
    main()
