"""The composition root: settings in, a Ray Serve application out. `import_path: serve_app.app:build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.llm import LLMConfig, build_llm_deployment

from serve_app.engine.vllm_engine import WORKER_EXTENSION
from serve_app.ingress import Gateway
from serve_app.replica import Replica
from serve_app.routing.router import router_config
from serve_app.settings import (
    AutoscalingSettings,
    BaseModelSettings,
    ReplicaSettings,
    Settings,
    load_settings,
    parse_settings,
)

# Serve runs an ingress in a thread beside its own event loop by default. With HAProxy in front and a client that sends
# `x-request-disconnect-disabled` it then passes on a `receive` that belongs to the other loop, and no disconnect ever arrives.
# One loop also saves two thread hops a chunk, here and in the replicas.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}

# Ray hands a process' metrics on from a thread that it makes anew every ten seconds. Where there are more threads than arenas
# (glibc makes eight a core), each new thread gets the next arena in turn, and each grows by a whole export that it never gives
# back. README.md of this package has the figures.
FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
PROCESS_ENV = ONE_LOOP | FEW_ARENAS

# vLLM takes an empty list for "anywhere"; a host that can't exist means "nowhere".
NO_MEDIA_DOMAIN = "none.invalid"


def build(args: dict[str, Any]) -> Application:
    """The application. `args` are the settings themselves, or empty: then `loramux.yaml` is read, `{"config": path}` names
    another file. Raises InvalidRequest for settings that make no sense."""
    if set(args) <= {"config"}:
        return application(load_settings(Path(args["config"]) if args else None))
    return application(parse_settings(args))


def application(settings: Settings) -> Application:
    handles = {base.id: _replica_deployment(settings, base) for base in settings.bases}
    gateway = serve.deployment(
        Gateway,
        name="Gateway",
        num_replicas=settings.gateway.replicas,
        max_ongoing_requests=settings.gateway.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.gateway.num_cpus, "runtime_env": {"env_vars": PROCESS_ENV}},
    )
    return gateway.bind(settings, handles)


def _replica_deployment(settings: Settings, base: BaseModelSettings) -> Application:
    replica = ReplicaSettings(
        base=base.id,
        registry=settings.registry,
        cache=settings.cache,
        slot_wait_s=base.slot_wait_s,
        prewarm_on_publish=base.prewarm_on_publish,
        warm_start_s=base.warm_start_s,
    )
    return build_llm_deployment(llm_config(base), bind_kwargs={"settings": replica})


def llm_config(base: BaseModelSettings) -> LLMConfig:
    """Ray LLM's own configuration of the base."""
    engine = {"allowed_media_domains": list(base.allowed_media_domains) or [NO_MEDIA_DOMAIN]} | base.engine
    if engine.get("enable_lora"):
        engine.setdefault("worker_extension_cls", WORKER_EXTENSION)
    cpu = {"placement_group_config": {"bundles": [{"CPU": 1}]}} if base.accelerator == "cpu" else {}
    return LLMConfig(
        model_loading_config={"model_id": base.id, "model_source": base.source or base.id},
        engine_kwargs=engine,
        accelerator_type=base.accelerator_type,
        deployment_config=_deployment(base),
        runtime_env={"env_vars": PROCESS_ENV | base.env},
        server_cls=Replica,
        **cpu,
    )


def _deployment(base: BaseModelSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_ongoing_requests": base.max_ongoing_requests,
        "max_queued_requests": base.max_queued_requests,
        "request_router_config": router_config(base.full_at, base.routing_stats_period_s),
        "health_check_period_s": 5,
        "health_check_timeout_s": 10,
    }
    if isinstance(base.replicas, AutoscalingSettings):
        return options | {"autoscaling_config": base.replicas.model_dump()}
    return options | {"num_replicas": base.replicas}  # an autoscaled replica is not told how many there are
