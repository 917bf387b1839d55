"""Packages are layered: what a package may import inside its service is below it in the lists here, and nothing goes in
circles, imports for type checking counted."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("services", "kernels", "cli", "benchmarks")

# Package → its parts from the lowest to the highest. A part imports only those on lines above its own.
LAYERS: dict[str, tuple[str, ...]] = {
    "services.engine": (
        "kv_cache",
        "requests",
        "observability",
        "constraints",
        "kv_offload",
        "scheduler",
        "models",
        "compute_sharing",
        "executors",
        "adapters",
        "loop",
        "settings",
        "server",
    ),
    "services.gateway": (
        "core",
        "rate_limits",
        "settings",
        "text",
        "protocol",
        "auth",
        "engines",
        "inference",
        "api",
        "ui",
        "middleware",
        "server",
    ),
    "services.trainer": (
        "settings",
        "timers",
        "metrics",
        "packing",
        "optimizer",
        "parent_versions",
        "losses",
        "memory",
        "host",
        "sampling",
        "evaluation",
        "jobs",
        "runtime",
        "training_sessions",
    ),
    "services.common": (
        "errors",
        "shutdown",
        "validation",
        "settings",
        "security",
        "telemetry",
        "storage",
        "json_schema",
        "text",
        "adapters",
        "jobs",
        "evaluation",
        "queue",
    ),
    "services.learning": ("feedback", "request_log", "datasets", "canaries", "learners"),
    "cli": (
        "settings",
        "interrupts",
        "output",
        "job_files",
        "reports",
        "http",
        "options",
        "local",
        "doctor",
        "agent",
        "commands",
        "demo",
        "main",
    ),
    "benchmarks": (
        "lib",
        "kernels",
        "serving",
        "gateway",
        "fleet",
        "structured",
        "prefix_cache",
        "training",
        "quality",
        "tuning",
        "suite",
    ),
}
# Entries that a directory of code may have, besides __init__.py. Results of benchmarks are data.
MOST_ENTRIES = 14
MOST_LINES = 450
GENERATED = ("services/common/pb", "benchmarks/results")


@cache
def modules() -> dict[str, Path]:
    found = {}
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if not str(relative).startswith(GENERATED):
                found[".".join(part for part in relative.with_suffix("").parts if part != "__init__")] = path
    return found


def imports(name: str) -> Iterator[str]:
    """Our modules that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules() else node.module
                for alias in node.names
            ]
        yield from (other for other in names if other in modules() and other != name)


@cache
def graph() -> dict[str, frozenset[str]]:
    return {name: frozenset(imports(name)) for name in modules()}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other: what is left when nodes without a way in or out are taken away."""
    left = {node: set(others) for node, others in edges.items()}
    while True:
        reached = set().union(*left.values()) if left else set()
        ends = {node for node, others in left.items() if not others & left.keys() or node not in reached}
        if not ends:
            return [sorted(left)] if left else []
        left = {node: others - ends for node, others in left.items() if node not in ends}


def packages() -> Iterable[str]:
    return sorted({name.rpartition(".")[0] for name in modules() if "." in name})


def test_no_module_is_in_a_circle() -> None:
    assert circles({name: set(others) for name, others in graph().items()}) == []


@pytest.mark.parametrize("package", packages())
def test_parts_of_a_package_are_in_no_circle(package: str) -> None:
    edges: dict[str, set[str]] = {}
    for name, others in graph().items():
        if name.startswith(package + "."):
            part = name[len(package) + 1 :].split(".")[0]
            inside = {other[len(package) + 1 :].split(".")[0] for other in others if other.startswith(package + ".")}
            edges.setdefault(part, set()).update(inside - {part})
    assert circles(edges) == []


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_only_what_is_below(package: str) -> None:
    layers = LAYERS[package]
    parts = {name[len(package) + 1 :].split(".")[0] for name in modules() if name.startswith(package + ".")}
    assert parts - {"__main__"} == set(layers), f"give each part of {package} its layer"
    up = [
        f"{name} imports {other}"
        for name, others in graph().items()
        if name.startswith(package + ".") and name != f"{package}.__main__"
        for other in others
        if other.startswith(package + ".")
        and layers.index(other[len(package) + 1 :].split(".")[0]) > layers.index(name[len(package) + 1 :].split(".")[0])
    ]
    assert up == []


def test_a_directory_fits_on_a_screen() -> None:
    crowded = {}
    for top in TOPS:
        for directory, folders, files in os.walk(ROOT / top):
            folders[:] = [folder for folder in folders if folder != "__pycache__"]
            relative = str(Path(directory).relative_to(ROOT))
            entries = len(folders) + len([file for file in files if file != "__init__.py"])
            if entries > MOST_ENTRIES and not relative.startswith(GENERATED):
                crowded[relative] = entries
    assert crowded == {}


def test_a_module_can_be_read_at_once() -> None:
    sizes = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: lines for name, lines in sizes.items() if lines > MOST_LINES} == {}
