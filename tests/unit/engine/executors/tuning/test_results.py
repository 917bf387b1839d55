"""Results on disk: what comes back, and what is not used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from kernels.gpu.attention.decode import DecodeConfig
from kernels.gpu.configs import KernelConfigs, Product, Tuned
from kernels.gpu.launch.device import named
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from services.engine.executors.tuning.choice import Choice, put
from services.engine.executors.tuning.results import Identity, Outcome, load, path_of, save
from services.engine.executors.tuning.search import sources_digest, use
from services.engine.executors.tuning.tuner import Band

IDENTITY = Identity(
    place={"device": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "shapes": ((18432, 2560),), "pages": None},
    software={"driver": "570.1", "torch": "2.9", "kernels": "ab"},
)
CHOICE: Choice = {
    Product("fp8", 18432, 2560): SkinnyConfig("tma", 128, 128, 4, 4, 2, 512, stagger=True, early=True),
    Product("none", 2560, 9216): None,
    "attention": DecodeConfig(32, 4, 3, 8, min_keys=128, merge=16),
}
OUTCOME = Outcome([Band(1, {}, 2e-3), Band(8, CHOICE, 3e-3, 0.03)], 41.5, 210)


def test_results_come_back(tmp_path: Path) -> None:
    path = save(tmp_path / "tuned", IDENTITY, OUTCOME)
    assert load(tmp_path / "tuned", IDENTITY) == OUTCOME
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    save(tmp_path / "tuned", IDENTITY, replace(OUTCOME, trials=1))
    assert load(tmp_path / "tuned", IDENTITY) == replace(OUTCOME, trials=1)


@pytest.mark.parametrize("name", ["driver", "torch", "kernels"])
def test_results_of_other_software_are_not_used_and_a_line_says_so(tmp_path: Path, name: str) -> None:
    save(tmp_path, IDENTITY, OUTCOME)
    with capture_logs() as logs:
        assert load(tmp_path, replace(IDENTITY, software={**IDENTITY.software, name: "another"})) is None
    assert [(each["log_level"], each["changed"]) for each in logs] == [("info", [name])]


def test_each_device_and_model_has_its_own(tmp_path: Path) -> None:
    other = replace(IDENTITY, place={**IDENTITY.place, "shapes": ((6144, 1024),)})
    save(tmp_path, IDENTITY, OUTCOME)
    assert load(tmp_path, other) is None
    save(tmp_path, other, replace(OUTCOME, trials=2))
    assert load(tmp_path, IDENTITY) == OUTCOME
    # A file under another's name.
    path_of(tmp_path, other).replace(path_of(tmp_path, IDENTITY))
    with capture_logs() as logs:
        assert load(tmp_path, IDENTITY) is None
    (line,) = logs
    assert "another device" in line["error"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:100],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"block_n": 128', '"block_n": 100'),
        lambda text: text.replace('"rows": 8', '"rows": 0'),
        lambda text: text.replace('"fp8"', '"fp3"'),
        lambda text: text.replace('"merge"', '"marge"'),
    ],
)
def test_a_damaged_file_is_not_used_and_a_line_names_it(tmp_path: Path, damage: object) -> None:
    path = save(tmp_path, IDENTITY, OUTCOME)
    text = path.read_text()
    damaged = damage(text)  # type: ignore[operator]
    assert damaged != text
    path.write_text(damaged)
    with capture_logs() as logs:
        assert load(tmp_path, IDENTITY) is None
    assert [(each["log_level"], each["file"]) for each in logs] == [("warning", str(path))]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    save(tmp_path, IDENTITY, OUTCOME)
    with patch("os.fsync", side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        save(tmp_path, IDENTITY, replace(OUTCOME, trials=1))
    assert load(tmp_path, IDENTITY) == OUTCOME
    assert len(list(tmp_path.iterdir())) == 1


def test_choices_hold_from_the_captured_number_of_rows_before_up_to_their_own() -> None:
    kernels = KernelConfigs(named("sm90"))
    product = Product("fp8", 18432, 2560)
    use(kernels, [Band(4, {}), Band(8, CHOICE), Band(1, {product: None})])
    rows = sorted(count for each, count in kernels.tuned.products if each == product)
    assert rows == [1, 5, 6, 7, 8]
    assert sorted(kernels.tuned.attention) == [5, 6, 7, 8]
    use(kernels, [Band(8, {})])
    assert kernels.tuned == Tuned()


def test_a_choice_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="no attention"):
        put(Tuned(), [1], {Product("none", 1, 1): DecodeConfig(32, 4, 3, 8)})
    with pytest.raises(TypeError, match="attention is not"):
        put(Tuned(), [1], {"attention": None})


def test_the_digest_of_sources_follows_every_file(tmp_path: Path) -> None:
    (tmp_path / "linear").mkdir()
    (tmp_path / "linear" / "a.py").write_text("x = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "linear" / "a.py").write_text("x = 2\n")
    assert sources_digest(tmp_path) != before
