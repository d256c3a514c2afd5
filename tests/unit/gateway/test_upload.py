"""Publishing by upload: what comes in, what is refused and when, what is left on the disk."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import tarfile
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapters import cli
from adapters import errors as e
from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry
from adapters.settings import StoreSettings
from adapters.store import open_store
from gateway.settings import GatewaySettings
from gateway.uploads import Uploads
from tests.adapter_folders import ALPHA, CLOTHES, TEXT, AdapterFolder, plain
from tests.scripted_backend import ScriptedBackend
from tests.unit.gateway.conftest import until
from tests.unit.gateway.test_promoter import replicas, row

BASE = "tiny/base"
TARGET = {"base": BASE, "name": "crow"}


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(bases=("demo", BASE))


@pytest.fixture
def settings(tmp_path: Path) -> GatewaySettings:
    return GatewaySettings(upload_dir=tmp_path / "uploads", max_upload_bytes=200_000, max_uploads=2, upload_idle_s=5)


@pytest.fixture
async def registry(registry):
    await registry.put_base(TEXT)
    return registry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return plain().write(tmp_path / "adapter")


@pytest.fixture(autouse=True)
def nothing_is_left(settings):
    yield
    assert not settings.upload_dir.exists() or not list(settings.upload_dir.iterdir())


def files_of(folder: Path) -> list[tuple[str, tuple[str, bytes]]]:
    return [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir()) if path.is_file()]


async def upload(http, folder: Path, status: int = 201, **query):
    answer = await http.post("/registry/v1/publish", params=TARGET | query, files=files_of(folder))
    assert answer.status_code == status, answer.text
    return answer.json()


def multipart(parts: list[tuple[str, bytes]], boundary: str = "b") -> bytes:
    body = b""
    for name, data in parts:
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        body += head.encode() + data + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


async def send(http, body, content_type: str = "multipart/form-data; boundary=b", **query):
    return await http.post("/registry/v1/publish", params=TARGET | query, content=body, headers={"content-type": content_type})


# What comes in


async def test_an_upload_is_a_version_that_answers_at_once(http, folder):
    made = await upload(http, folder, promote="production", message="first", who="ann")
    assert (made["ref"], made["created"], made["promoted"], made["seen"]) == (f"{BASE}:crow@1", True, "production", True)
    assert (await http.get(f"/v1/models/{BASE}:crow")).status_code == 200
    shown = (await http.get("/registry/v1/version", params=TARGET)).json()
    assert (shown["who"], shown["message"], shown["source"]) == ("ann", "first", {"kind": "upload"})


async def test_an_upload_brings_its_tags_metrics_and_run(http, folder):
    told = {
        "tag": ["eval=passed", "owner=ann"],
        "metric": ["solve_rate=0.71", "loss=1e-3"],
        "source_run": "r7",
        "source_step": 40,
    }
    made = await upload(http, folder, promote="production", **told)
    shown = (await http.get("/registry/v1/version", params=TARGET)).json()
    assert shown["tags"] == {"eval": "passed", "owner": "ann"}
    assert shown["metrics"] == {"solve_rate": 0.71, "loss": 0.001}
    assert shown["source"] == {"kind": "upload", "run": "r7", "step": 40}
    assert made["aliases"] == {"production": 1}
    assert (await http.get("/registry/v1/adapter", params=TARGET)).headers["etag"] == f'"{made["revision"]}"'


async def test_a_promotion_with_an_old_revision_is_refused_before_anything_is_uploaded(http, registry, folder, tmp_path):
    made = await upload(http, folder, promote="production")
    other = plain(seed=8).write(tmp_path / "other")
    query = TARGET | {"promote": "production"}
    old, new = {"if-match": f'"{made["revision"] - 1}"'}, {"if-match": f'"{made["revision"]}"'}
    refused = await http.post("/registry/v1/publish", params=query, files=files_of(other), headers=old)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_conflict")
    assert await registry.versions(BASE, "crow") == [1]
    taken = await http.post("/registry/v1/publish", params=query, files=files_of(other), headers=new)
    assert taken.json()["aliases"] == {"production": 2}


async def test_the_same_content_again_is_the_same_version(http, folder):
    first = await upload(http, folder)
    again = await upload(http, folder, status=200)
    assert (again["version"], again["digest"], again["created"]) == (1, first["digest"], False)


async def test_the_same_content_from_two_at_once_is_one_version(http, folder):
    async def one() -> dict:
        answer = await http.post("/registry/v1/publish", params=TARGET, files=files_of(folder))
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    made = await asyncio.gather(one(), one())
    assert [each["version"] for each in made] == [1, 1]
    assert sorted(each["created"] for each in made) == [False, True]


async def test_files_may_come_in_any_order_and_in_small_pieces(http, folder):
    config, weights = (folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes()
    digests = set()
    for order in ([0, 1], [1, 0]):
        both = [("adapter_config.json", config), ("adapter_model.safetensors", weights)]
        body = multipart([both[index] for index in order])

        async def pieces(body: bytes = body) -> AsyncIterator[bytes]:
            for start in range(0, len(body), 777):
                yield body[start : start + 777]

        answer = await send(http, pieces())
        assert answer.status_code in (200, 201), answer.text
        digests.add(answer.json()["digest"])
    assert len(digests) == 1


async def test_shards_and_other_files_of_the_folder_may_come_along(http, tmp_path):
    sharded = AdapterFolder(plain().config, plain().tensors, shards=3, files={"trainer_state.json": b"{}"})
    made = await upload(http, sharded.write(tmp_path / "sharded"))
    assert "merge-shards" in {rule["name"] for rule in made["rules"]}


def tar_of(folder: Path, mode: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:
        tar.add(folder, "adapter")
    return packed.getvalue()


def zip_of(folder: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, path.name)
    return packed.getvalue()


async def test_archives_are_taken_as_the_body_or_as_the_one_file(http, folder):
    plain_digest = (await upload(http, folder))["digest"]
    bodies = [
        ("application/x-tar", tar_of(folder, "w")),
        ("application/gzip", tar_of(folder, "w:gz")),
        ("application/zip", zip_of(folder)),
        ("multipart/form-data; boundary=b", multipart([("adapter.tar.gz", tar_of(folder, "w:gz"))])),
    ]
    for content_type, body in bodies:
        answer = await send(http, body, content_type)
        assert answer.status_code == 200, answer.text
        assert answer.json()["digest"] == plain_digest


async def test_an_archive_that_climbs_out_is_a_422(http):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("../../evil")
        tar.addfile(info, io.BytesIO(b""))
    answer = await send(http, packed.getvalue(), "application/x-tar")
    assert answer.status_code == 422
    assert answer.json()["error"]["reason"] == "archive_unsafe"


async def test_a_dry_run_says_what_would_happen_and_does_nothing(http, registry, folder):
    said = await upload(http, folder, status=200, dry_run=True, promote="production")
    assert (said["dry_run"], said["version"], said["rank"]) == (True, None, 4)
    assert await registry.versions(BASE, "crow") == []
    made = await upload(http, folder)
    assert (await upload(http, folder, status=200, dry_run=True))["version"] == 1
    assert said["digest"] == made["digest"]


async def test_options_reach_the_contract(http, folder, tmp_path):
    odd = CLOTHES["FSDP"](plain()).write(tmp_path / "odd")
    error = (await upload(http, odd, status=422, strict=True))["error"]
    assert error["reason"] == "rewrite_needed"
    assert (await upload(http, folder, alpha=ALPHA * 2, keep_dtype=True))["alpha"] == ALPHA * 2


# Refusals

BAD = {
    "rank over the limit": lambda: plain(rank=16),
    "another method": lambda: plain().configured(peft_type="LOHA"),
    "DoRA": lambda: plain().configured(use_dora=True),
    "no effect": lambda: AdapterFolder(
        plain().config, {key: value * (0 if "lora_B" in key else 1) for key, value in plain().tensors.items()}
    ),
    "layers beyond": lambda: plain().renamed(lambda key: key.replace("layers.1.", "layers.99.")),
    "a half pair": lambda: plain().minus("layers.0.self_attn.q_proj.lora_A"),
    "nothing like it": lambda: plain().renamed(lambda key: key.replace("proj", "projection")),
    "a bad configuration": lambda: plain().configured(r="many"),
    "no scale": lambda: plain().configured(lora_alpha=0),
}


@pytest.mark.parametrize("name", BAD)
async def test_http_python_and_the_command_refuse_with_the_same_words(http, registry, tmp_path, monkeypatch, name):
    folder = BAD[name]().write(tmp_path / "bad")
    with pytest.raises(e.AdapterRefused) as caught:
        await publish_folder(registry, Publication(BASE, "crow", folder))
    refused = caught.value
    over_http = (await upload(http, folder, status=422))["error"]
    told = {"code", "reason", "limit", "value", "hint"}
    assert {key: over_http.get(key) for key in told} == {key: getattr(refused, key) for key in told}
    assert over_http["message"] == str(refused)
    assert await registry.versions(BASE, "crow") == []

    monkeypatch.setenv("LORAMUX_REGISTRY__URL", f"file://{tmp_path}/registry")
    await Registry(open_store(StoreSettings(url=f"file://{tmp_path}/registry"))).put_base(TEXT)
    command = ["publish", str(folder), "--base", BASE, "--name", "crow", "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, cli.app, command)
    assert result.exit_code == 1
    by_command = json.loads(result.stderr)["error"]
    assert {key: by_command.get(key) for key in told} == {key: over_http.get(key) for key in told}


async def test_a_body_that_is_too_long_is_refused_by_its_length_alone(http):
    answer = await http.post(
        "/registry/v1/publish",
        params=TARGET,
        content=b"",
        headers={"content-type": "multipart/form-data; boundary=b", "content-length": "200001"},
    )
    assert (answer.status_code, answer.json()["error"]["limit"]) == (413, 200_000)


async def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_long(http):
    async def endless() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="x.bin"\r\n\r\n'
        for _ in range(30):
            yield b"x" * 10_000

    answer = await send(http, endless())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "bad_multipart"),
        (b"nonsense", "bad_multipart"),
        (b"--b\r\n", "bad_multipart"),
        (b"--b--\r\n", "no_files"),
        (b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nhalf', "bad_multipart"),
        (b'--b\r\ncontent-disposition: form-data; name="base"\r\n\r\ndemo\r\n--b--\r\n', "not_a_file"),
        (b"--b\r\n\r\nx\r\n--b--\r\n", "bad_multipart"),
        (multipart([("../evil", b"x")]), "bad_file_name"),
        (multipart([("/etc/passwd", b"x")]), "bad_file_name"),
        (multipart([("..", b"x")]), "bad_file_name"),
        (multipart([("a\\b", b"x")]), "bad_file_name"),
        (multipart([("", b"x")]), "bad_file_name"),
        (multipart([("n" * 300, b"x")]), "bad_file_name"),
        (multipart([("a", b"x"), ("a", b"y")]), "file_twice"),
        (multipart([(f"f{number}", b"x") for number in range(65)]), "too_many_files"),
        (b"--b\r\n" + b"x: y\r\n" * 20 + b"\r\n", "bad_multipart"),
        (b"--b\r\nx: " + b"y" * 10_000, "bad_multipart"),
    ],
)
async def test_a_body_that_makes_no_sense_is_a_clear_400(http, body, reason):
    answer = await send(http, body)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, reason), answer.text


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "text/plain", "multipart/mixed; boundary=b", "multipart/form-data"]
)
async def test_a_body_of_another_kind_is_a_400(http, content_type):
    answer = await send(http, b"{}", content_type)
    assert answer.status_code == 400


async def test_a_folder_without_weights_is_told_what_is_missing(http):
    answer = await send(http, multipart([("adapter_config.json", b"{}")]))
    assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "no_tensors")


@pytest.mark.parametrize(
    "query",
    [
        {"name": "Crow"},
        {"base": "a:b"},
        {"promote": "v1"},
        {"alpha": "nan"},
        {"alpha": "0"},
        {"drop": "all"},
        {"x": "y"},
        {"tag": "a"},
        {"metric": "a=b"},
    ],
)
async def test_a_wrong_option_is_a_400(http, folder, query):
    await upload(http, folder, status=400, **query)


async def test_a_protected_alias_is_refused_before_anything_is_uploaded(http, registry, folder, tmp_path):
    await upload(http, folder, promote="production")
    await registry.protect(BASE, "crow", "production")
    other = plain(seed=8).write(tmp_path / "other")
    error = (await upload(http, other, status=403, promote="production"))["error"]
    assert error["reason"] == "alias_protected"
    assert await registry.versions(BASE, "crow") == [1]
    assert (await upload(http, other, promote="production", unlock=True))["aliases"] == {"production": 2}


async def test_more_uploads_than_places_are_a_503_that_says_when_to_come_again(http, settings):
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        begun.release()
        await go_on.wait()
        yield b"--b--\r\n"

    running = [asyncio.create_task(send(http, waiting())) for _ in range(settings.max_uploads)]
    for _ in running:
        await begun.acquire()
    answer = await send(http, multipart([("a", b"x")]))
    go_on.set()
    await asyncio.gather(*running)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["reason"]) == (503, "overloaded", "too_many_uploads")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await send(http, multipart([("a", b"x")]))).status_code != 503


@pytest.mark.parametrize("pauses_s", [[0.6], [0.03] * 20])
async def test_a_client_that_pauses_or_drips_is_let_go(app, http, pauses_s):
    object.__setattr__(app.state.parts, "settings", app.state.parts.settings.model_copy(update={"upload_idle_s": 0.2}))

    async def dripping() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            yield b"x"

    answer = await send(http, dripping())
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "upload_paused")


async def test_a_client_that_goes_away_leaves_nothing_behind(app, settings):
    said = []
    messages = [
        {
            "type": "http.request",
            "body": b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nxx',
            "more_body": True,
        },
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def sending(message):
        said.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/registry/v1/publish",
        "raw_path": b"/registry/v1/publish",
        "query_string": f"base={BASE}&name=crow".encode(),
        "root_path": "",
        "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
        "client": ("127.0.0.1", 1),
        "server": ("gateway", 80),
    }
    await app(scope, receive, sending)
    assert said[0]["status"] == 400
    assert json.loads(said[1]["body"])["error"]["reason"] == "upload_cut_off"


# Ready


async def test_wait_ready_answers_after_a_replica_said_a_token(http, backend, folder):
    made = await upload(http, folder, wait_ready=True, promote="production")
    assert made["readiness"] == {"ready": True, "reason": None, "message": None}
    assert [request.ref for request in backend.requests] == [f"{BASE}:crow@1"]
    assert backend.running == 0
    assert made["promoted"] == "production"


async def test_a_version_that_no_replica_can_load_is_published_and_not_promoted(http, backend, folder):
    backend.error = e.AdapterIncompatible("the engine took 3 of 14 modules", reason="not_all_applied", limit=14, value=3)
    made = await upload(http, folder, wait_ready=True, promote="production")
    assert made["readiness"]["ready"] is False
    assert made["readiness"]["reason"] == "not_all_applied"
    assert (made["promoted"], made["aliases"]) == (None, {})


async def test_a_base_that_is_not_served_here_says_so_and_moves_the_alias(http, backend, folder):
    backend._bases = ("demo",)
    made = await upload(http, folder, wait_ready=True, promote="production")
    assert made["readiness"]["reason"] == "base_not_served"
    assert made["aliases"] == {"production": 1}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return plain(seed=8).write(tmp_path / "other")


async def test_an_upload_moves_an_alias_that_has_users_when_the_version_is_warm(http, app, backend, folder, other):
    await upload(http, folder, promote="production")
    old, new = f"{BASE}:crow@1", f"{BASE}:crow@2"
    backend.resident = {BASE: replicas({old: row()})["demo"]}
    going = asyncio.create_task(upload(http, other, promote="production"))
    await until(lambda: app.state.parts.view.entry(BASE, "crow").pending)
    backend.resident = {BASE: replicas({old: row(), new: row()})["demo"]}
    made = await asyncio.wait_for(going, 10)
    assert (made["promoted"], made["aliases"], made["readiness"]) == ("production", {"production": 2}, None)


async def test_an_upload_that_can_t_be_warmed_is_published_and_says_why_the_alias_stays(http, app, backend, folder, other):
    await upload(http, folder, promote="production")
    backend.resident = {BASE: replicas({f"{BASE}:crow@1": row()})["demo"]}
    going = asyncio.create_task(upload(http, other, promote="production"))
    view = app.state.parts.view
    await until(lambda: view.entry(BASE, "crow").pending)
    move = view.entry(BASE, "crow").pending["production"]
    failed = row("failed", "disk", reason="not_all_applied", move_id=move.id)
    backend.resident = {BASE: replicas({f"{BASE}:crow@2": failed})["demo"]}
    made = await asyncio.wait_for(going, 10)
    assert (made["promoted"], made["aliases"], made["readiness"]["reason"]) == (None, {"production": 1}, "promote_failed")
    assert "not_all_applied" in made["readiness"]["message"]


# The disk


async def test_leftovers_of_dead_processes_are_removed_and_uploads_under_way_are_not(settings):
    uploads = Uploads(settings)
    settings.upload_dir.mkdir(parents=True)
    for name in ("a" * 32, "b" * 32):
        (settings.upload_dir / name).mkdir()
        (settings.upload_dir / name / "half").write_bytes(b"x")
        (settings.upload_dir / f"{name}.lock").touch()
    living = (settings.upload_dir / f"{'b' * 32}.lock").open()
    fcntl.flock(living, fcntl.LOCK_EX)
    assert uploads.sweep() == 1
    assert sorted(path.name for path in settings.upload_dir.iterdir()) == ["b" * 32, f"{'b' * 32}.lock"]
    living.close()
    assert uploads.sweep() == 1


async def test_a_full_disk_is_a_503(http, folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gateway.uploads._append", full)
    error = (await upload(http, folder, status=503))["error"]
    assert (error["code"], error["reason"]) == ("storage_unavailable", "upload_dir_full")
