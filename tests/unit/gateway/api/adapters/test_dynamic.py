"""vLLM's calls to load and unload adapters, and the directory that is loaded at the start: what is taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from services.common.adapters.registry import CONFIG, WEIGHTS
from services.gateway.api.adapters.files import MAX_CONFIG_BYTES
from tests.stack import PATIENCE
from tests.unit.gateway.api.adapters.test_adapters import config, upload, weights
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine


def adapter(directory: Path, value: float = 1.0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / WEIGHTS).write_bytes(weights(value))
    (directory / CONFIG).write_bytes(config())
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


@pytest.fixture
def http(start: Starter, root: Path) -> httpx.Client:
    root.mkdir()
    running = start(FakeEngine(), adapters_dir=str(root), adapters_s3="s3://models/lora")
    return httpx.Client(base_url=running.url, timeout=PATIENCE, trust_env=False)


def load(http: httpx.Client, name: str, path: Path | str, **more: Any) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def listed(http: httpx.Client) -> dict[str, str | None]:
    return {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}


def refused(answer: httpx.Response, status: int, kind: str, says: str) -> None:
    body = answer.json()
    assert (answer.status_code, body["error"]["type"], body["error"]["code"]) == (status, kind, status), body
    assert says in body["error"]["message"], body
    assert (body["message"], body["type"]) == (body["error"]["message"], kind), "older releases of vLLM"


def test_a_life_in_vllms_words(http: httpx.Client, root: Path) -> None:
    first = adapter(root / "one")
    answer = load(http, "sql", first)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert listed(http) == {MODEL: None, "sql": MODEL}
    refused(load(http, "sql", first), 400, "InvalidUserInput", "The lora adapter 'sql' has already been loaded.")
    second = adapter(root / "nested" / "two", 2.0)
    assert load(http, "sql", second, load_inplace=True).status_code == 200
    assert load(http, "sql", "nested/two", load_inplace=True).status_code == 200
    assert http.get("/v1/adapters/sql").json()["version"] == "sql@2", "the same content is no further version"
    assert load(http, "sql", first, load_inplace=True).status_code == 200
    assert http.get("/v1/adapters/sql").json()["version"] == "sql@1", "back to what it was"
    assert load(http, "copy", "sql@2").status_code == 200
    assert http.get("/v1/adapters/copy").json()["manifest"]["loaded_from"] == "sql@2"
    answer = unload(http, "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert listed(http) == {MODEL: None, "copy": MODEL}
    refused(unload(http, "sql"), 404, "NotFoundError", "The lora adapter 'sql' cannot be found.")
    assert load(http, "sql", first).status_code == 200, "the name is free again"


def test_what_is_not_loaded(http: httpx.Client, root: Path, tmp_path: Path) -> None:
    outside = adapter(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    inside = adapter(root / "inside")
    for path in (outside, "../outside", "link", "inside/../../outside", "/etc"):
        refused(load(http, "x", path), 400, "InvalidUserInput", "outside of")
    for file in (WEIGHTS, CONFIG):
        part = adapter(root / f"part-{file}")
        (part / file).unlink()
        refused(load(http, "x", part), 400, "BadRequestError", "No such file")
        (part / file).symlink_to(outside / file)
        refused(load(http, "x", part), 400, "InvalidUserInput", "is a link out of")
    refused(load(http, "x", root / "none"), 404, "NotFoundError", "No adapter found for")
    pickled = adapter(root / "pickled")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    refused(load(http, "x", pickled), 400, "BadRequestError", "torch.save")
    huge = adapter(root / "huge")
    (huge / CONFIG).write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    refused(load(http, "x", huge), 400, "BadRequestError", "over the limit")
    (huge / CONFIG).write_bytes(config(peft_type="IA3"))
    refused(load(http, "x", huge), 400, "BadRequestError", "peft_type")
    (inside / WEIGHTS).write_bytes(b"no safetensors")
    refused(load(http, "x", inside), 400, "BadRequestError", "corrupt")
    for path, says in (
        ("s3://other/lora/a", "TEMPER_ADAPTERS_S3"),
        ("s3://models/lora-not/a", "TEMPER_ADAPTERS_S3"),
        ("s3://models/lora/../secret", "not of the form"),
    ):
        refused(load(http, "x", path), 400, "InvalidUserInput", says)
    refused(load(http, MODEL, inside), 400, "InvalidUserInput", "name of the base model")
    refused(load(http, "x", "sql@9"), 404, "NotFoundError", "does not exist")
    assert listed(http) == {MODEL: None}
    assert load(http, "x", inside, is_3d_lora_weight=True).status_code == 400


def test_versions_that_came_another_way_are_not_unloaded(http: httpx.Client) -> None:
    assert upload(http, "bot").status_code == 201
    refused(unload(http, "bot"), 400, "InvalidUserInput", "DELETE /v1/adapters/bot")
    assert load(http, "copy", "bot@1").status_code == 200
    assert http.post("/v1/adapters/copy/attach").status_code == 200
    refused(unload(http, "copy"), 400, "InvalidUserInput", "detach it first")


def test_without_a_directory_paths_are_refused(running: Running, http: httpx.Client, tmp_path: Path) -> None:
    with httpx.Client(base_url=running.url, timeout=PATIENCE, trust_env=False) as plain:
        refused(load(plain, "x", adapter(tmp_path / "a")), 400, "InvalidUserInput", "TEMPER_ADAPTERS_DIR")


def test_a_directory_is_served_from_the_start_by_all_replicas(start: Starter, root: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        adapter(root / name, value)
    (adapter(root / "bad") / WEIGHTS).write_bytes(b"x")
    (root / "no-adapter").mkdir()
    first = start(FakeEngine(), adapters_dir=str(root))
    shared = (first.registry, first.queue)
    second = start(FakeEngine(), adapters_dir=str(root), stores=lambda _: shared)  # type: ignore[arg-type, return-value]
    clients = [httpx.Client(base_url=one.url, timeout=PATIENCE, trust_env=False) for one in (first, second)]
    for client, running in zip(clients, (first, second), strict=True):
        running.wait_for(lambda client=client: {"one", "two"} <= listed(client).keys())  # type: ignore[misc]
    assert load(clients[0], "one", adapter(root / "one", 3.0), load_inplace=True).status_code == 200
    with ThreadPoolExecutor() as threads:
        answers = threads.map(lambda client: load(client, "three", root / "two"), clients)
    assert 200 in [answer.status_code for answer in answers]
    with capture_logs() as logs:
        third = start(FakeEngine(), adapters_dir=str(root), stores=lambda _: shared)  # type: ignore[arg-type, return-value]
        served = "an adapter of the directory is served"
        third.wait_for(lambda: {"one@2", "two@1"} <= {line["adapter"] for line in logs if line["event"] == served})
    again = httpx.Client(base_url=third.url, timeout=PATIENCE, trust_env=False)
    assert listed(again) == {MODEL: None, "one": MODEL, "two": MODEL, "three": MODEL}
    versions = {
        name: len(again.get(f"/v1/adapters/{name}/versions").json()["data"]) for name in ("one", "two", "three")
    }
    assert versions == {"one": 2, "two": 1, "three": 1}
