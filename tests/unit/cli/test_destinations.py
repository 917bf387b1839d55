"""Secrets of the environment and a temper.toml that only lies in the working directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.doctor.checks.settings import SETTINGS
from cli.main import app
from cli.settings import BadSettings, UpSettings, read
from services.common.settings import SENT_TO
from services.common.validation.settings import keys_of, variable_named
from services.model_source.settings import ModelSourceSettings
from tests.unit.cli.server import Reply, serving


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, without variables of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("TEMPER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def temper(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refusal() -> str:
    """What is said of the settings of `temper up`; empty: they can be used."""
    try:
        read(UpSettings)
    except BadSettings as error:
        return error.message
    return ""


@pytest.mark.parametrize(("address", "secret"), [(one, secret) for one in SENT_TO for secret in SENT_TO[one]])
def test_a_file_that_nobody_named_does_not_say_where_secrets_go(
    home: Path, monkeypatch: pytest.MonkeyPatch, address: str, secret: str
) -> None:
    line = f'{address} = "http://elsewhere:1"\n'
    file = home / "temper.toml"
    file.write_text(line)
    assert refusal() == "", "there is no secret that could go there"
    variable = variable_named(secret)
    monkeypatch.setenv(variable, "of-the-environment")
    assert f"{variable} is not sent where {file} says, which nobody named" in refusal()
    monkeypatch.setenv("TEMPER_CONFIG", "temper.toml")
    assert refusal() == ""
    monkeypatch.delenv("TEMPER_CONFIG")
    file.write_text(f'{line}{secret} = "of-the-environment"\n')
    assert refusal() == "", "the file has the secret itself"
    file.write_text(line)
    monkeypatch.setenv(variable_named(address), "http://here:1")
    assert refusal() == "", "the environment says where"


@pytest.mark.parametrize("words", [("config", "check"), ("pull", "a/b", "--directory", "c"), ("up", "--model", "a/b")])
def test_commands_end_before_they_send_one(home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setenv("TEMPER_HF_TOKEN", "of-the-environment")
    with serving(lambda _: Reply({})) as (url, seen):
        (home / "temper.toml").write_text(f'hf_endpoint = "{url}"\n')
        result = temper(*words)
    assert result.exit_code == 2
    assert "TEMPER_HF_TOKEN is not sent" in result.output
    assert "of-the-environment" not in result.output
    assert seen == []


def test_it_is_known_of_every_secret_where_it_goes() -> None:
    classes = (*SETTINGS, ModelSourceSettings)
    secrets = {
        keys[name]
        for settings in classes
        for keys in [dict(zip(settings.model_fields, keys_of(settings), strict=True))]
        for name, field in settings.model_fields.items()
        if "SecretStr" in str(field.annotation)
    }
    of_an_address = {secret for found in SENT_TO.values() for secret in found}
    # These have their servers in them, or are servers; the last one's is looked at when it is sent (key_for).
    others = {"redis_url", "target_keys", "https_proxy", "http_proxy", "api_key"}
    assert secrets == of_an_address | others
