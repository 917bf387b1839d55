"""Adapters over HTTP: upload, list, download, attach, delete, and what is refused."""

from __future__ import annotations

import io
import json
import resource
import struct
import tarfile

import httpx
import openai
import pytest

from services.common.adapters.manifest import DRAFTER_CONFIG, DRAFTER_WEIGHTS
from services.common.adapters.registry import CONFIG, WEIGHTS
from tests.unit.gateway.conftest import MODEL, Running


def weights(value: float = 1.0) -> bytes:
    header = json.dumps({"a.lora_A.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<2f", value, 2.0)


def config(**changes: object) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **changes}).encode()


def upload(http: httpx.Client, name: str = "bot", files: dict[str, bytes] | None = None, **more: str) -> httpx.Response:
    parts = {WEIGHTS: weights(), CONFIG: config()} if files is None else files
    return http.post("/v1/adapters", data={"name": name, **more}, files=parts)


def test_life_of_an_adapter(running: Running, http: httpx.Client) -> None:
    answer = upload(http)
    assert answer.status_code == 201, answer.text
    version = answer.json()
    assert (version["id"], version["rank"], version["base_digest"]) == ("bot@1", 4, "d" * 64)
    assert upload(http, files={WEIGHTS: weights(3.0), CONFIG: config()}).json()["id"] == "bot@2"
    assert running.engine.syncs >= 2

    assert http.get("/v1/adapters").json()["data"] == [
        {"object": "adapter", "name": "bot", "kind": "adapter", "current": 2, "version": "bot@2", "attached": None}
    ]
    assert [v["id"] for v in http.get("/v1/adapters/bot/versions").json()["data"]] == ["bot@1", "bot@2"]
    assert http.get("/v1/adapters/bot").json()["manifest"]["id"] == "bot@2"

    assert http.post("/v1/adapters/bot/attach").json()["attached"] == "bot@2"
    assert http.post("/v1/adapters/bot/attach", json={"version": 1}).json()["attached"] == "bot@1"
    assert http.get("/v1/adapters/bot").json()["attached"] == "bot@1"
    assert http.delete("/v1/adapters/bot").status_code == 409
    assert http.post("/v1/adapters/bot/detach", json={"version": 2}).status_code == 409
    assert http.post("/v1/adapters/bot/detach", json={"version": 1}).json()["attached"] is None
    told = running.webhooks.told[-1]
    assert (told.type, told.data) == ("adapter.detached", {"adapter": None, "before": "bot@1", "model": MODEL})
    assert http.post("/v1/adapters/bot/detach").status_code == 200
    assert http.delete("/v1/adapters/bot").json()["deleted"] is True
    assert http.get("/v1/adapters/bot").status_code == 404


def test_a_key_publishes_once_also_if_its_gateway_died_before_it_noted_it(running: Running, http: httpx.Client) -> None:
    def sent(key: str, value: float = 1.0) -> str:
        parts = {WEIGHTS: weights(value), CONFIG: config()}
        answer = http.post("/v1/adapters", data={"name": "bot"}, files=parts, headers={"idempotency-key": key})
        return str(answer.raise_for_status().json()["id"])

    assert sent("one") == "bot@1"
    running.records.kept.clear()  # what it would have noted, and its claim, which has ended
    assert sent("one") == "bot@1"
    assert sent("other") == "bot@2"
    running.records.kept.clear()
    assert sent("one", 2.0) == "bot@3"
    assert [v["id"] for v in http.get("/v1/adapters/bot/versions").json()["data"]] == ["bot@1", "bot@2", "bot@3"]


def test_an_upload_that_finds_no_room_on_disk_says_so(http: httpx.Client) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        answer = upload(http, files={WEIGHTS: bytes(3 << 20), CONFIG: config()})
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", bytes(3 << 20))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for refused in (answer, file):
        assert refused.status_code == 503, refused.text
        assert "no room for the upload" in refused.json()["error"]["message"]


def drafter_files(**changes: object) -> dict[str, bytes]:
    described = {"format": 1, "base_digest": "d" * 64, **changes}
    return {DRAFTER_WEIGHTS: weights(), DRAFTER_CONFIG: json.dumps(described).encode()}


def test_a_drafter_is_a_version_that_answers_nothing(http: httpx.Client) -> None:
    answer = upload(http, "sharp", drafter_files())
    assert (answer.status_code, answer.json().get("kind"), answer.json().get("rank")) == (201, "drafter", None)
    assert upload(http, "sharp", drafter_files()).json()["id"] == "sharp@2"
    assert http.post("/v1/adapters/sharp/rollback").json()["current"] == "sharp@1"
    upload(http, "bot")
    kinds = {one["name"]: one["kind"] for one in http.get("/v1/adapters").json()["data"]}
    assert kinds == {"sharp": "drafter", "bot": "adapter"}
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL, "bot"]
    asked = ("bot@1", "sharp@1", "sharp", "bot*0.5", "bot+nope", "bot@1+sharp@1", "bot@2*0.5")
    assert [http.get(f"/v1/models/{name}").status_code for name in asked] == [200, 404, 404, 200, 404, 404, 404]
    assert http.get("/v1/models/bot*0.5").json()["adapter"] == "bot@1*0.5"
    assert http.get("/v1/adapters/sharp/download", params={"file": DRAFTER_CONFIG}).json()["format"] == 1

    attach = http.post("/v1/adapters/sharp/attach")
    assert attach.status_code == 400
    assert "is a drafter" in attach.json()["error"]["message"]
    sources = [{"adapter": "bot"}, {"adapter": "sharp"}]
    merge = http.post("/v1/adapters/both/merge", json={"sources": sources})
    assert (merge.status_code, merge.json()["error"]["param"]) == (400, "sources[1].adapter")


def test_a_name_has_versions_of_one_kind(http: httpx.Client) -> None:
    upload(http, "sharp", drafter_files())
    upload(http, "bot")
    for name, sent in (("sharp", None), ("bot", drafter_files())):
        answer = upload(http, name, sent)
        assert answer.status_code == 400
        assert f"{name} is the name of a" in answer.json()["error"]["message"]
    merge = http.post("/v1/adapters/sharp/merge", json={"sources": [{"adapter": "bot"}]})
    assert "is the name of a drafter" in merge.json()["error"]["message"]
    job = {"adapter": "sharp", "examples": [{"prompt": "a", "completion": "b"}]}
    assert "is the name of a drafter" in http.post("/v1/train/sft", json=job).json()["error"]["message"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({**drafter_files(), CONFIG: config()}, DRAFTER_WEIGHTS),
        ({DRAFTER_WEIGHTS: weights()}, DRAFTER_CONFIG),
        (drafter_files(format=2), "format is 2"),
        (drafter_files(base_digest=None), "base_digest"),
        ({**drafter_files(), DRAFTER_WEIGHTS: b"torn"}, DRAFTER_WEIGHTS),
    ],
)
def test_what_is_no_drafter_is_refused(http: httpx.Client, files: dict[str, bytes], named: str) -> None:
    answer = upload(http, "sharp", files)
    assert answer.status_code in (400, 422)
    assert named in answer.json()["error"]["message"]


def test_download(running: Running, http: httpx.Client) -> None:
    upload(http)
    answer = http.get("/v1/adapters/bot/download")
    assert answer.headers["content-disposition"] == 'attachment; filename="bot-1.tar.gz"'
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert sorted(archive.getnames()) == [f"bot-1/{CONFIG}", f"bot-1/{WEIGHTS}"]
        assert archive.extractfile(f"bot-1/{WEIGHTS}").read() == weights()
    assert http.get("/v1/adapters/bot/download", params={"file": CONFIG, "version": 1}).content == config()
    assert http.get("/v1/adapters/bot/download", params={"file": "../CURRENT"}).status_code == 404
    assert http.get("/v1/adapters/bot/download", params={"version": 7}).status_code == 404
    assert http.get("/v1/adapters/bot/download", params={"version": 0}).status_code == 400


def test_models(running: Running, http: httpx.Client, client: openai.OpenAI) -> None:
    upload(http)
    http.post("/v1/adapters/bot/attach")
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL, "bot"]
    assert models[0].model_extra["adapter"] == "bot@1"
    assert models[1].model_extra["parent"] == MODEL
    assert models[1].model_extra["root"] == "bot@1"
    assert client.models.retrieve("bot").id == "bot"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("nobody")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({WEIGHTS: b"garbage", CONFIG: config()}, WEIGHTS),
        ({WEIGHTS: weights()[:-3], CONFIG: config()}, WEIGHTS),
        ({WEIGHTS: b"", CONFIG: config()}, WEIGHTS),
        ({WEIGHTS: weights(), CONFIG: b"{"}, CONFIG),
        ({WEIGHTS: weights(), CONFIG: b"[]"}, CONFIG),
        ({WEIGHTS: weights(), CONFIG: config(peft_type="IA3")}, "peft_type"),
    ],
)
def test_corrupt_upload(running: Running, http: httpx.Client, files: dict[str, bytes], named: str) -> None:
    answer = upload(http, files=files)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["code"] == "adapter_rejected"
    assert named in answer.json()["error"]["message"]
    assert not running.store.objects


def test_an_upload_may_not_hide_the_base_model(running: Running, http: httpx.Client) -> None:
    answer = upload(http, name=MODEL)
    assert answer.status_code == 400
    assert "the name of the base model" in answer.json()["error"]["message"]
    assert not running.store.objects


def test_foreign_upload_is_refused_by_the_engine(running: Running, http: httpx.Client) -> None:
    running.engine.rejects = "tensor layers.0.q_proj.lora_A has shape [4, 64], expected [4, 32]"
    answer = upload(http)
    assert answer.status_code == 422
    assert "q_proj" in answer.json()["error"]["message"]
    assert not running.store.objects, "it did not become a version"


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "base", "", "a" * 65, "x\0y", "-a"])
def test_upload_name(http: httpx.Client, name: str) -> None:
    assert upload(http, name=name).status_code == 400


def test_upload_parts(http: httpx.Client) -> None:
    answer = upload(http, files={WEIGHTS: weights()})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, CONFIG)
    answer = upload(http, extra="1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "extra")
    assert http.post("/v1/adapters", json={"name": "bot"}).status_code == 400
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert http.post("/v1/adapters", content=b"nonsense", headers=headers).status_code == 400
    assert http.post("/v1/adapters", content=b"x", headers={"content-type": "multipart/form-data"}).status_code == 400


@pytest.mark.parametrize(
    "files",
    [
        {"adapter_model.bin": b"PK\x03\x04rest", CONFIG: config()},
        {"adapter_model.pt": b"\x80\x02rest", CONFIG: config()},
        {WEIGHTS: b"PK\x03\x04rest of a zip file", CONFIG: config()},
        {WEIGHTS: b"\x80\x02rest of a pickle", CONFIG: config()},
    ],
)
def test_weights_of_torch_save_are_refused_with_the_way_out(http: httpx.Client, files: dict[str, bytes]) -> None:
    answer = upload(http, files=files)
    assert answer.status_code == 422, answer.text
    assert "save_pretrained(DIRECTORY) writes it so" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(files))


@pytest.mark.parametrize("path", ["..%2F..%2Fetc", "..", "%2e%2e%2fx/versions", "a%5C..%5Cb", "base", "a%00b"])
def test_path_traversal(running: Running, path: str) -> None:
    # Sent raw: HTTP clients tidy such paths away.
    answer = _raw(running.url, f"/v1/adapters/{path}")
    assert answer.startswith("HTTP/1.1 400"), answer
    assert '"error"' in answer


def _raw(url: str, path: str) -> str:
    import socket

    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        received = b""
        while part := connection.recv(65536):
            received += part
    return received.decode()


def test_missing(http: httpx.Client) -> None:
    for method, path in [
        ("GET", "bot"),
        ("DELETE", "bot"),
        ("GET", "bot/versions"),
        ("GET", "bot/download"),
        ("POST", "bot/attach"),
        ("POST", "bot/detach"),
        ("GET", "bot/nothing"),
    ]:
        answer = http.request(method, f"/v1/adapters/{path}")
        assert answer.status_code == 404, (path, answer.text)
    upload(http)
    assert http.post("/v1/adapters/bot/attach", json={"version": 9}).status_code == 404
    assert http.post("/v1/adapters/bot/attach", json={"version": "1"}).status_code == 400
    assert http.post("/v1/adapters/bot/attach", json={"versoin": 1}).json()["error"]["param"] == "versoin"


def test_a_version_of_another_base_model_is_not_attached(running: Running, http: httpx.Client) -> None:
    files = {WEIGHTS: weights(), CONFIG: config()}
    for digest in ("e" * 64, "d" * 64):
        running.registry.publish("bot", files, base_digest=digest)
    answer = http.post("/v1/adapters/bot/attach", json={"version": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_rejected")
    assert "bot@1 belongs to base model eeeeeeeeeeee, the engines serve dddddddddddd" in answer.text
    assert http.get("/v1/adapters/bot").json()["attached"] is None
    assert http.post("/v1/adapters/bot/attach", json={"version": 2}).json()["attached"] == "bot@2"


def test_store_away(running: Running, http: httpx.Client) -> None:
    upload(http)
    running.engine.attached = "bot@1"
    running.wait_for(lambda: running.inference.engines.attached == "bot@1")
    running.store.down = True
    for method, path in [("GET", ""), ("GET", "/bot"), ("POST", "/bot/attach"), ("DELETE", "/bot")]:
        answer = http.request(method, f"/v1/adapters{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "retry-after" in answer.headers
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200, "completions go on"
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL, "bot"]
    assert http.get("/readyz").status_code == 200
    assert http.get("/healthz").json()["object_store"].startswith("unavailable")


@pytest.mark.parametrize(
    "config", [b"[" * 100_000, b'{"a":' * 100_000, b'{"format":' + b"1" * 5000 + b"}", b'"\\ud800"']
)
def test_a_drafters_json_that_python_cannot_read_is_refused(http: httpx.Client, config: bytes) -> None:
    files = drafter_files() | {DRAFTER_CONFIG: config}
    answer = upload(http, "sharp", files)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("adapter_rejected", DRAFTER_CONFIG)
    assert "is not JSON" in error["message"]
    assert "sys." not in error["message"]
