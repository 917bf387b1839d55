"""Imports point one way (docs/architecture.md names the layers); the gateway and the CLI never load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("services", "kernels", "cli", "models", "benchmarks", "tests", "proto", "images", "observability", "docs_tools")

# Package → what of ours it may import besides itself. Longest prefix wins.
ALLOWED: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "services.common": (),
    "services.learning": ("services.common",),
    "services.environments": (),
    "services.gateway": ("services.learning", "services.common"),
    "services.engine": ("kernels", "services.common"),
    "services.adapter_tools": ("services.engine.models", "services.common"),
    "services.trainer": ("services.adapter_tools", "services.engine.models", "kernels", "services.common"),
    # Cuts checkpoints, and lets the trainer's packing and methods work on them.
    "services.forge": (
        "services.trainer",
        "services.adapter_tools",
        "services.engine.models",
        "kernels",
        "services.common",
    ),
    "services.model_source": ("services.engine.models.checkpoint", "services.common"),
    "services.pod": (
        "services.forge",
        "services.adapter_tools",
        "services.engine",
        "services.trainer",
        "services.common",
        "kernels",
    ),
    "cli": ("services.common",),
    # Reads settings and files as the services do. What needs torch is a process of its own, services.card_check.
    "cli.doctor": (
        "cli",
        "services.common",
        "services.engine.settings",
        "services.engine.models.checkpoint",
        "services.engine.models.registry",
        "services.gateway.settings",
        "services.trainer.settings",
        "services.model_source.settings",
    ),
    "services.card_check": ("services.pod", "services.engine", "services.common", "kernels"),
    "proto": (),
    "models": ("services", "kernels", "cli"),
    # Made of what the services export; no service knows it.
    "observability": ("services",),
    # Reads all that has a page.
    "docs_tools": ("services", "cli", "benchmarks"),
}

TORCH = ("torch", "triton", "transformers", "peft", "safetensors.torch")
# Plain Python by design: a gateway image carries no torch, the scheduling policy is testable without it.
NO_TORCH = (
    "services.common",
    "services.gateway",
    "services.learning",
    "services.environments",
    "cli",
    "services.engine.requests",
    "services.engine.scheduler",
    "services.engine.kv_cache",
    "services.engine.kv_offload",
    "services.engine.settings",
    "observability",
    "services.engine.models.checkpoint",
    "services.engine.models.qwen3_5.config",
    "services.model_source",
    "services.forge.units",
    "services.forge.cut",
    "services.forge.record",
    "services.common.security.signature",
    "docs_tools",
)
# The demo draws its questions from the recipe of the tiny model, and scores the answers with it.
EXTRA: dict[str, tuple[str, ...]] = {
    "cli.demo.command": ("models.tiny.recipe.item", "models.tiny.recipe.skills"),
    "cli.demo.api": ("models.tiny.recipe.item", "models.tiny.recipe.skills"),
    "cli.demo.loop.visitors": ("models.tiny.recipe.item", "models.tiny.recipe.skills"),
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def modules() -> Iterator[tuple[str, Path]]:
    for top in ALLOWED:
        if "." in top and top.split(".")[0] != "services":
            continue
        directory = ROOT / top.replace(".", "/")
        for path in sorted(directory.rglob("*.py")):
            relative = path.relative_to(ROOT).with_suffix("")
            yield ".".join(part for part in relative.parts if part != "__init__"), path


@cache
def imported(path: Path, module: str) -> tuple[tuple[str, int, bool], ...]:
    """(name, line, at type-checking time only) of every import, `from x import y` as both x and x.y."""
    return tuple(_imported(path, module))


def _imported(path: Path, module: str) -> Iterator[tuple[str, int, bool]]:
    tree = ast.parse(path.read_text(), str(path))
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and any(isinstance(part, ast.Name) and part.id == "TYPE_CHECKING" for part in ast.walk(node.test))
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            yield node.module or "", node.lineno, id(node) in typing_only
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, id(node) in typing_only


MODULES = list(modules())


def test_every_module_is_under_a_rule() -> None:
    for package in (ROOT / "services").iterdir():
        if package.is_dir() and package.name != "__pycache__":
            assert f"services.{package.name}" in ALLOWED, f"give services.{package.name} its import directions"


def home_of(module: str) -> str:
    """The package whose rule is a module's."""
    return max((top for top in ALLOWED if within(module, top)), key=len)


@pytest.mark.parametrize("home", ALLOWED)
def test_imports_point_one_way(home: str) -> None:
    inside = [(module, path) for module, path in MODULES if home_of(module) == home]
    assert inside
    wrong = [
        f"{module}:{line}: {name}"
        for module, path in inside
        for name, line, _ in imported(path, module)
        if name.split(".")[0] in OURS
        # `from services import x` yields "services" and "services.x": only the second says anything.
        and name != "services"
        and not any(within(name, target) for target in (home, *ALLOWED[home], *EXTRA.get(module, ())))
    ]
    assert not wrong, f"modules of {home} may import {ALLOWED[home]} only"


@pytest.mark.parametrize("home", NO_TORCH)
def test_no_torch_where_none_belongs(home: str) -> None:
    inside = [(module, path) for module, path in MODULES if within(module, home)]
    assert inside
    wrong = [
        f"{module}:{line}: {name}"
        for module, path in inside
        for name, line, typing_only in imported(path, module)
        if any(within(name, heavy) for heavy in TORCH) and not typing_only
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "services.gateway.server.app",
        "services.engine.scheduler.scheduler",
        "services.model_source.fetch",
        "cli.main",
        "cli.commands.up",
    ],
)
def test_nothing_loads_torch_behind_our_back(module: str) -> None:
    """Also through third parties: what counts is what is in memory after the import."""
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("cli.main", ("redis", "minio", "grpc", "numpy", "matplotlib")), ("cli.doctor.quick", ("numpy", "torch"))],
)
def test_commands_do_not_wait_for_what_others_need(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
