"""`/registry/v1`: adapters, versions and aliases over HTTP. Adapter names are query or body values, never path segments."""

from fastapi import APIRouter

from gateway.registry_routes import changing, placing, publishing, pulling, reading

router = APIRouter(prefix="/registry/v1")
for room in (reading, changing, placing, pulling, publishing):
    router.include_router(room.router)
router.include_router(publishing.upload_router)
