"""`temper keys`: what lands in the file, and what is shown."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.commands.up import UpOptions, compose
from cli.main import app
from cli.settings import UpSettings
from services.common.security.api_keys import Scope, digest, parse_keys
from tests.unit.cli.commands.test_up import ports_of
from tests.unit.cli.server import Reply, serving


def keys(*args: str, file: Path | None = None) -> Result:
    env = {"TEMPER_API_KEYS_FILE": None if file is None else str(file), "COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["keys", *args], env=env)


def test_create_list_revoke(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = keys("create", "--name", "ci", "--scopes", "train, inference", "--tokens-per-minute", "5000", file=file)
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert len(key) == 46
    assert key.startswith("tp-")
    (entry,) = parse_keys(file.read_bytes()).keys
    assert entry.sha256 == digest(key)
    assert (entry.name, entry.scopes) == ("ci", (Scope.INFERENCE, Scope.TRAIN))
    assert entry.limits.model_dump(exclude_none=True) == {"tokens_per_minute": 5000}
    assert key not in file.read_text()
    assert key[3:] not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert entry.id in made.stderr
    assert key not in made.stderr

    file.chmod(0o640)
    second = json.loads(keys("create", "--name", "x", "--expires-days", "0", "--json", file=file).stdout)
    assert second["key"].startswith("tp-")
    assert second["scopes"] == ["inference"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640, "who may read it stays"
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]

    revoked = keys("revoke", entry.id, file=file)
    assert revoked.stdout.strip() == f"{entry.id} is revoked"
    assert [key.refusal(datetime.now(UTC)) for key in parse_keys(file.read_bytes()).keys] == [
        "has been revoked",
        "has expired",
    ]
    listed = keys("list", "--file", str(file)).stdout
    assert entry.id in listed
    assert "5000 tokens/min" in listed
    as_json = json.loads(keys("list", "--json", file=file).stdout)
    assert [key["state"] for key in as_json] == ["revoked", "expired"]
    assert "sha256" not in as_json[0]
    again = keys("revoke", entry.id, file=file)
    assert again.exit_code == 1
    assert "already" in again.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("create", "--name", "a", "--scopes", "root"), "--scopes takes inference, train, attach, admin, got 'root'"),
        (("create", "--name", "a", "--scopes", ","), "--scopes takes"),
        (("create", "--name", "a", "--requests-per-minute", "-1"), "--requests-per-minute: Input should be"),
        (("create", "--name", "a" * 201), "--name: String should have at most 200"),
        (("create", "--name", "a", "--expires-days", "1e12"), "--expires-days is too far away"),
        (("list",), "cannot be read: No such file"),
        (("revoke", "k-1"), "cannot be read: No such file"),
    ],
)
def test_wrong_use(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    result = keys(*args, file=tmp_path / "keys.json")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "keys.json").exists()


def test_a_file_that_is_none_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys": [], "comment": "mine"}')
    result = keys("create", "--name", "a", file=file)
    assert result.exit_code == 2
    assert "is not a key file: comment" in result.stderr
    assert file.read_text() == '{"keys": [], "comment": "mine"}'
    assert keys("create", "--name", "a", file=tmp_path / "no" / "keys.json").exit_code == 2
    assert keys("revoke", "k-1", file=file).exit_code == 2
    file.write_text('{"keys": []}')
    assert keys("revoke", "k-1", file=file).exit_code == 1


def test_writers_take_turns(tmp_path: Path) -> None:
    from cli.commands.keys import _changing
    from services.common.security.api_keys import new_entry, new_key

    file = tmp_path / "keys.json"

    def add(number: int) -> None:
        entry = new_entry(new_key(), name=str(number), scopes=(Scope.TRAIN,))
        with _changing(file, create=True) as change:
            change(lambda keys: (*keys, entry))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    assert sorted(int(key.name) for key in parse_keys(file.read_bytes()).keys) == list(range(40))


def test_commands_send_the_key() -> None:
    with serving(lambda _: Reply({"object": "list", "data": [], "attached": None})) as (url, seen):
        for key in ("tp-secret", None):
            env = {"TEMPER_API_KEY": key, "NO_COLOR": "1"}
            assert CliRunner().invoke(app, ["adapters", "list", "--url", url], env=env).exit_code == 0
    assert [request.headers.get("authorization") for request in seen] == ["Bearer tp-secret", None]


def test_a_missing_key_names_its_variable() -> None:
    with serving(lambda _: Reply({"error": {"message": "this needs an API key"}}, 401)) as (url, _):
        result = CliRunner().invoke(app, ["adapters", "list", "--url", url], env={"NO_COLOR": "1"})
    assert result.exit_code == 1
    assert "TEMPER_API_KEY" in result.stderr


def test_up_gives_the_file_to_the_gateway_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings, expected in (
        (UpSettings(), None),
        (UpSettings(api_keys_file="keys.json"), str(tmp_path / "keys.json")),
    ):
        data_dir = tmp_path / f"data-{expected is None}"
        data_dir.mkdir()
        services, _ = compose(UpOptions(), data_dir, settings, ports_of(data_dir))
        found = {service.name: service.env.get("TEMPER_API_KEYS_FILE") for service in services}
        assert found.pop("gateway") == expected
        assert not any(found.values())
