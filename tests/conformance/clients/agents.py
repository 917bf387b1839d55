"""Coding agents as their users run them: default settings but for URL, key and model, and without a network."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.clients.place import NODE_MODULES, node, version

OFFLINE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}
"""What an agent asks of others than Temper fails at once."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one run."""

    url: str
    model: str
    home: Path
    work: Path


@dataclass(frozen=True, slots=True)
class Agent:
    """``prepare`` writes the agent's own configuration and gives its command, to which the task is appended, and its
    environment."""

    name: str
    package: str
    prepare: Callable[[Setting], tuple[list[str], Mapping[str, str]]]

    @property
    def version(self) -> str:
        return version(self.package)

    def run(self, setting: Setting, task: str, *, seconds: float) -> subprocess.CompletedProcess[str]:
        """One task to its end.

        Raises:
            subprocess.TimeoutExpired: it was not done in time; it is not running any more.
        """
        setting.home.mkdir(parents=True)
        setting.work.mkdir(parents=True)
        command, own = self.prepare(setting)
        environment = {"PATH": f"{node().parent}:/usr/bin:/bin", "HOME": str(setting.home), "LANG": "C.UTF-8"}
        return subprocess.run(
            [*command, task],
            cwd=setting.work,
            env={**environment, **OFFLINE, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )


def _platform_binary(pattern: str) -> str:
    """Of a package that has its program in another one for each platform."""
    found = sorted(NODE_MODULES.glob(pattern))
    if not found:
        raise RuntimeError(f"{NODE_MODULES} has no {pattern}: there is no such client for this platform")
    return str(found[0])


def _claude_code(setting: Setting) -> tuple[list[str], Mapping[str, str]]:
    environment = {
        "ANTHROPIC_BASE_URL": setting.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": setting.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return [_platform_binary("@anthropic-ai/claude-code-linux-*/claude"), "--allowedTools=Bash", "-p"], environment


def _codex(setting: Setting) -> tuple[list[str], Mapping[str, str]]:
    directory = setting.home / ".codex"
    directory.mkdir()
    (directory / "config.toml").write_text(
        f'model = "{setting.model}"\nmodel_provider = "temper"\ncheck_for_update_on_startup = false\n\n'
        f'[analytics]\nenabled = false\n\n[model_providers.temper]\nname = "Temper"\n'
        f'base_url = "{setting.url}/v1"\nenv_key = "TEMPER_API_KEY"\nwire_api = "responses"\n'
    )
    # Its sandbox is for machines with user namespaces; a container has none to give.
    options = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(node()), str(NODE_MODULES / "@openai/codex/bin/codex.js"), *options], {"TEMPER_API_KEY": "none"}


def _opencode(setting: Setting) -> tuple[list[str], Mapping[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Temper",
        "options": {"baseURL": f"{setting.url}/v1", "apiKey": "none"},
        "models": {setting.model: {"name": setting.model}},
    }
    config = {"model": f"temper/{setting.model}", "provider": {"temper": provider}}
    (setting.work / "opencode.json").write_text(json.dumps(config))
    environment = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return [_platform_binary("opencode-linux-*[!e]/bin/opencode"), "run"], environment


def _qwen_code(setting: Setting) -> tuple[list[str], Mapping[str, str]]:
    directory = setting.home / ".qwen"
    directory.mkdir()
    quiet = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
    (directory / "settings.json").write_text(json.dumps(quiet))
    environment = {
        "OPENAI_BASE_URL": f"{setting.url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": setting.model,
    }
    return [str(node()), str(NODE_MODULES / "@qwen-code/qwen-code/cli-entry.js"), "--yolo", "-p"], environment


AGENTS = {
    agent.name: agent
    for agent in (
        Agent("claude-code", "@anthropic-ai/claude-code", _claude_code),
        Agent("codex", "@openai/codex", _codex),
        Agent("opencode", "opencode-ai", _opencode),
        Agent("qwen-code", "@qwen-code/qwen-code", _qwen_code),
    )
}
