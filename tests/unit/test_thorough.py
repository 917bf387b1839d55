"""Tests that `make test` leaves out have a cheaper one beside them that it runs."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.thorough import covering, mark_thorough, spread

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    str(path.relative_to(ROOT)): tree
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if "thorough" in (text := path.read_text()) and path != Path(__file__)
    for tree in [ast.parse(text)]
}


def is_thorough(node: ast.expr) -> bool:
    """``pytest.mark.thorough`` itself; one of a case's ``marks`` is of that case only."""
    return isinstance(node, ast.Attribute) and node.attr == "thorough"


def left_out_whole(tree: ast.Module) -> list[str]:
    """Of what holds for a whole module or class: it has no test left to keep the promise."""
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == "pytestmark" for to in node.targets
        ):
            wrong += [
                f"line {node.lineno}"
                for part in ast.walk(node.value)
                if isinstance(part, ast.expr) and is_thorough(part)
            ]
        if isinstance(node, ast.ClassDef) and any(map(is_thorough, node.decorator_list)):
            wrong.append(f"line {node.lineno}")
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    if all(any(map(is_thorough, node.decorator_list)) for node in tests):
        wrong.append("every test")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_a_module_keeps_a_test_of_each_promise(module: str) -> None:
    assert left_out_whole(MODULES[module]) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def test_a(): pass\n@pytest.mark.thorough\ndef test_b(): pass", []),
        ("@pytest.mark.thorough\ndef test_b(): pass", ["every test"]),
        ("pytestmark = [pytest.mark.thorough]\ndef test_a(): pass", ["line 1"]),
        ("@pytest.mark.thorough\nclass TestB: ...\ndef test_a(): pass", ["line 2"]),
    ],
)
def test_what_is_found(source: str, wrong: list[str]) -> None:
    assert left_out_whole(ast.parse(source)) == wrong


def test_a_sample_has_each_value_of_a_product() -> None:
    product = [{"a": a, "b": b, "c": c} for a in range(3) for b in range(2) for c in range(4)]
    kept = [product[place] for place in covering(product)]
    assert len(kept) == 4
    assert {value for case in kept for value in case.items()} == {value for case in product for value in case.items()}


PRODUCT = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("shape", [{"heads": 1}, {"heads": 2}])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "bound"), [("a", 0.1), ("b", 0.2), ("c", 0.3), ("d", 0.4)])
def test_product(shape, rows, dtype, bound): ...
"""


class Marked:
    """Plugin of a pytest: what is left of its tests."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_thorough(items)
        self.kept = [item for item in items if item.get_closest_marker("thorough") is None]


def test_of_a_product_as_pytest_collects_it_few_are_left(tmp_path: Path) -> None:
    (tmp_path / "test_product.py").write_text(PRODUCT)
    found = Marked()
    options = ["-qq", "--collect-only", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    assert pytest.main([*options, "-W", "ignore", str(tmp_path)], plugins=[found]) == pytest.ExitCode.OK
    cases = [case.callspec.params for case in found.kept if isinstance(case, pytest.Function)]
    assert len(cases) == 4
    assert {(case["dtype"], case["bound"]) for case in cases} == {("a", 0.1), ("b", 0.2), ("c", 0.3), ("d", 0.4)}
    assert {case["rows"] for case in cases} == {1, 2, 3}
    assert {str(case["shape"]) for case in cases} == {"{'heads': 1}", "{'heads': 2}"}


def test_a_sample_of_a_number_lies_evenly_among_all() -> None:
    assert spread(1, 3) == {0}
    assert spread(2, 4) == {0, 2}
    assert spread(5, 2) == {0, 1}
    with pytest.raises(ValueError, match="at least one"):
        spread(0, 1)
