"""The OpenAPI document is true: schemathesis asks every route what it must answer, and what it must not.

The same against a running gateway: `schemathesis run http://127.0.0.1:8000/openapi.json`, in the root of the repository, where
`schemathesis.toml` says which answers are no faults.
"""

from __future__ import annotations

import asyncio
import uuid

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, settings

from adapters.registry import Registry
from adapters.settings import StoreSettings
from adapters.store import open_store
from gateway.app import build_app
from gateway.settings import GatewaySettings
from tests.scripted_backend import ScriptedBackend
from tests.unit.gateway.conftest import prepared

KNOWN = {"base": "demo", "name": "parrot", "alias": "production", "version": 1}
seeded = settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


async def _registry() -> Registry:
    registry = Registry(open_store(StoreSettings(url=f"memory://{uuid.uuid4().hex}")))
    for content in (b"one", b"two"):
        await registry.publish("demo", "parrot", prepared(content))
    await registry.promote("demo", "parrot", "production", 1)
    return registry


def _app() -> FastAPI:
    limits = GatewaySettings(max_body_bytes=100_000, max_upload_bytes=1_000_000)
    app = build_app(limits, asyncio.run(_registry()), ScriptedBackend())
    asyncio.run(app.state.parts.view.refresh())
    return app


def _app_with_examples() -> FastAPI:
    """Examples in the document lead to an adapter that is there; the document for users has none, so that nobody's is moved."""
    app = _app()
    for path in app.openapi()["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] in KNOWN:
                    parameter["example"] = KNOWN[parameter["name"]]
    for model in app.openapi()["components"]["schemas"].values():
        for name, field in model.get("properties", {}).items():
            if name in KNOWN and "anyOf" not in field:
                field["example"] = KNOWN[name]
    return app


document = schemathesis.openapi.from_asgi("/openapi.json", _app())
with_examples = schemathesis.openapi.from_asgi("/openapi.json", _app_with_examples())


@document.parametrize()
@seeded
def test_every_route_answers_as_the_document_says(case):
    case.call_and_validate()


@with_examples.parametrize()
@seeded
def test_every_route_answers_as_the_document_says_about_what_is_there(case):
    case.call_and_validate()
