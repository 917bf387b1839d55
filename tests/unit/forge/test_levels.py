"""Levels of pruning, and the choice of units."""

from __future__ import annotations

import pytest

from services.common.errors import InvalidRequest
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.registry import read_config
from services.forge.importance.scores import Scores
from services.forge.levels import Level, choose
from services.forge.units import Kind
from tests.unit.forge.models import TINY


def tiny() -> Qwen3_5Config:
    config = read_config(TINY)
    assert isinstance(config, Qwen3_5Config)
    return config


@pytest.mark.parametrize(
    ("kind", "text", "removed"),
    [
        ("kv_groups", "50%", 1),
        ("key_heads", "1", 1),
        ("layers", "25%", 2),
        ("layers", "12.5%", 1),
        ("mlp_channels", "10%", 48),  # the nearest multiple of 16 to 460.8 is 464
        ("mlp_channels", "25%", 128),
        ("mlp_channels", "40%", 208),
        ("mlp_channels", "99%", 496),
        ("mlp_channels", "256", 256),
    ],
)
def test_levels_are_numbers_of_units(kind: Kind, text: str, removed: int) -> None:
    assert Level.parse(text, kind).removed(tiny(), kind) == removed


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("kv_groups", "25%", r"25% of 2 cannot go; possible are 1 \(0\.5 of them\)"),
        ("kv_groups", "2", "2 of 2 cannot go"),
        ("layers", "10%", r"possible are 1 \(0\.125 of them\), .*6 \(0\.75"),
        ("layers", "0", "cannot go"),
        ("mlp_channels", "1%", r"possible are 16 \(0\.03125 of them\), .* 496 .*in steps of 16"),
        ("mlp_channels", "100", "in steps of 16"),
        ("mlp_channels", "512", "cannot go"),
        ("mlp_channels", "100%", "100% of 512 cannot go"),
        ("mlp_channels", "150%", r"150% of 512 cannot go; possible are 16"),
        ("key_heads", "half", "write a share like 25%"),
        ("key_heads", "1.5", "write a share like 25%"),
    ],
)
def test_what_is_impossible_is_refused_with_what_is_possible(kind: Kind, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Level.parse(text, kind).removed(tiny(), kind)


def test_the_lowest_scores_go_and_each_layer_has_its_own() -> None:
    layers = ("layers.3", "layers.7", "mtp.layers.0")
    groups = dict(zip(layers, ((0.1, 0.2), (0.2, 0.1), (0.3, 0.3)), strict=True))
    scores = Scores("random", "d", layers=(5, 4, 3, 0, 2, 6, 7, 1), widths={"kv_groups": groups})
    levels: dict[Kind, Level] = {"kv_groups": Level.parse("1", "kv_groups"), "layers": Level.parse("2", "layers")}
    cut = choose(tiny(), scores, levels, mtp=True)
    assert cut.layers == (0, 1, 2, 5, 6, 7), "the last attention layer stays whatever its score"
    assert cut.kept == {"kv_groups": {"layers.7": (0,), "mtp.layers.0": (0,)}}


def test_a_kind_without_scores_or_level_is_named() -> None:
    scores = Scores("random", "d", layers=(1,) * 8)
    with pytest.raises(InvalidRequest, match="say nothing of key_heads"):
        choose(tiny(), scores, {"key_heads": Level.parse("1", "key_heads")}, mtp=True)
    with pytest.raises(InvalidRequest, match="say what is to go"):
        choose(tiny(), scores, {}, mtp=True)
    with pytest.raises(InvalidRequest, match=r"7 of 8 cannot go; possible are .* 6 \(0\.75 of them\)"):
        choose(tiny(), scores, {"layers": Level.parse("7", "layers")}, mtp=True)
