"""Hands the gateway's app to Ray Serve, which binds the port."""

from __future__ import annotations

import gc
import importlib
import time

from ray import serve
from ray.serve.handle import DeploymentHandle

from adapters.registry import Registry
from adapters.store import open_store
from gateway.app import Outside, build_app
from gateway.backend import BaseInfo
from serve_app.drop import watch_drop
from serve_app.handle_backend import HandleBackend
from serve_app.ray_meter import RayMeter
from serve_app.settings import Settings


def _settle() -> None:
    """Loads what the first upload would load, and takes what is there now out of the collector's walks: each would hold up
    running streams for 50 to 100 ms, and nothing of it ever goes."""
    importlib.import_module("adapters.contract.canonical")
    gc.freeze()


@serve.ingress()
class Gateway:
    """One gateway process: a registry view, a backend over handles, and the FastAPI app between them."""

    def __init__(self, settings: Settings, handles: dict[str, DeploymentHandle]) -> None:
        self._settings = settings
        self._handles = handles

    async def __serve_build_asgi_app__(self):
        settings = self._settings
        now_s = int(time.time())
        backend = HandleBackend(
            self._handles,
            bases={base.id: BaseInfo(base.id, now_s, base.engine.get("max_model_len")) for base in settings.bases},
            max_queued={base.id: base.max_queued_requests for base in settings.bases},
        )
        meter = RayMeter()
        registry = Registry(open_store(settings.registry, meter=meter))
        app = build_app(
            settings.gateway,
            registry,
            backend,
            poll_interval_s=settings.registry.poll_interval_s,
            sweep_interval_s=settings.registry.sweep_interval_s,
            outside=Outside(sources=settings.registry, webhook=settings.webhook),
            meter=meter,
            on_loaded=_settle,
        )
        watch_drop(app, registry, settings.drop, settings.registry)
        return app
