"""Patterns mean what they mean in PEFT, and none takes long."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from services.engine.models.lora import module_patterns
from services.engine.models.lora.module_patterns import Effort, PatternRefused, tail, whole
from services.engine.models.lora.peft_config import AdapterSettings

ALL = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj_qkv|in_proj_z|in_proj_a|in_proj_b|out_proj"
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "linear_attn.in_proj_qkv", "mlp.up_proj", "mlp.down_proj")
NAMES = [
    f"{prefix}layers.{layer}.{module}"
    for prefix in ("model.", "model.language_model.")
    for layer in (0, 1, 3, 10, 11)
    for module in MODULES
]
SHORT = ("a.q_proj", "l.3.b", "aab.abb", "layers.0")
ATOMS = (
    *("a", "b", r"\.", "l", "[a-l]", "[^a.]", r"\d", r"\w", r"\W", r"\b", r"\B", ".", "q_proj", "layers"),
    *("(?i:A)", "mode[lk]", "^", "$", r"\Z", r"\A"),
)


def drawn(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(ATOMS)
    inner = drawn(rng, depth - 1)
    if kind < 0.55:
        return inner + drawn(rng, depth - 1)
    if kind < 0.65:
        return f"(?:{inner}|{drawn(rng, depth - 1)})"
    if kind < 0.8:
        return f"(?:{inner}){rng.choice(['*', '+', '?', '{1,2}', '{,2}', '*?', '{2}', '{0,1}?'])}"
    if kind < 0.95:
        return f"({rng.choice(['', '?=', '?!'])}{inner})"
    return f"(?<{rng.choice('=!')}{rng.choice(ATOMS[:7])})"


@pytest.mark.parametrize("linear", [True, False], ids=["as-it-is", "without-re2"])
def test_what_python_finds(linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not linear:
        monkeypatch.setattr(module_patterns, "_linear", lambda expression, pattern: None)
    rng = random.Random(1)
    found = 0
    for _ in range(500):
        pattern = f"{rng.choice(['', '.*'])}{drawn(rng, 3)}{rng.choice(['', '.*'])}"
        try:
            named, ended = re.compile(pattern), re.compile(rf"(.*\.)?({pattern})$")
        except re.error:  # a flag that is not at the beginning
            continue
        matches, ends = whole(pattern, Effort()), tail(pattern, Effort())
        for name in SHORT:
            assert matches(name) == (named.fullmatch(name) is not None), (pattern, name)
            assert ends(name) == (ended.match(name) is not None), (pattern, name)
            found += matches(name)
    assert found > 300


@pytest.mark.parametrize(
    "pattern",
    [
        r"x{,3}.*",
        r"[[:alpha:]]*",
        r"model\.layers\.[\d]{1,}\.(?:self_attn|mlp)\..*",
        r"(?i)MODEL.*Q_PROJ",
        r"(?s:.*)q_proj",
        r"(?:a|(?=model)model).*\Z",
        r"(?!)|.*up_proj",
    ],
)
def test_what_re2_reads_otherwise_or_not_at_all(pattern: str) -> None:
    matches = whole(pattern, Effort())
    assert [name for name in NAMES if matches(name)] == [name for name in NAMES if re.fullmatch(pattern, name)]


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z_.0-9]+)+!",
        "(?=x|)([a-z_.0-9]+)+!",
        "(?!y)(.*.*.*.*.*)*!",
        "(?!y)((a|b|.)*)*!",
        "(?!y)(?:(?:(?:.{0,9}){0,99}){0,99}){0,99}!",
        "(?=(?=(?=(?=.*!)|.*).*).*)model!",
        "(?!y)" + "(" * 40 + ".*" + ")*" * 40,
    ],
)
def test_no_pattern_takes_long(pattern: str) -> None:
    matches, started = whole(pattern, Effort()), time.perf_counter()
    found = [name for name in NAMES[:20] if matches(name)]
    assert found == ([] if pattern.endswith("!") else NAMES[:20])
    assert time.perf_counter() - started < 20


def test_effort_is_of_a_whole_configuration() -> None:
    effort = Effort(40)
    one, other = whole("(?!y).*a", effort), tail("(?!y)b", effort)
    assert (one("aa"), other("a.b")) == (True, True)
    assert one("aaa")
    with pytest.raises(PatternRefused, match="takes too long to match"):
        any(other("a.b") and not one("aa") for _ in range(20))


def test_brackets_that_do_not_close_are_malformed() -> None:
    for pattern in ("(" * 1000, "(" * 600 + ")" * 600, "[", "(?", "*", ")"):
        for how in (whole, tail):
            with pytest.raises(PatternRefused):
                how(pattern, Effort())


CONFIGS: list[dict[str, Any]] = [
    {"target_modules": rf"^(model(?=\.).*\.({ALL}))$"},
    {"target_modules": rf"^(model\.language_model(?=\.).*\.({ALL}))$"},
    {"target_modules": rf"^(?!.*visual).*(?:{ALL}).*"},
    {
        "target_modules": rf"(?:.*?(?:language|text).*?(?:attn|mlp).*?\.(?:{ALL}))"
        rf"|(?:\bmodel\.layers\.[\d]{{1,}}(?!.*\.experts\.\d)\..*?(?:self_attn|mlp).*?\.(?:(?:{ALL})))"
    },
    {"target_modules": ["q_proj", "1.mlp.up_proj", "model.layers.3.mlp.down_proj"], "layers_to_transform": [1, 10]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    {
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [0, 3],
        "layers_pattern": ["h", "language_model.layers"],
    },
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0], "layers_pattern": "blocks"},
    {"target_modules": ["proj", "up_proj"], "exclude_modules": ["3.mlp.up_proj", "model.layers.0.mlp.up_proj"]},
    {"target_modules": ".*_proj", "exclude_modules": r"model\.layers\.(?!1)\d+\..*"},
    {"target_modules": ".*_proj", "exclude_modules": "all-linear"},
    {"target_modules": ["q_proj"], "rank_pattern": {".*language_model.*": 3, "^model.layers.1.*": 5, "q_proj": 7}},
    {
        "target_modules": ["q_proj"],
        "alpha_pattern": {r"layers\.1\..*": 3, "a)|(model": 5, r"(?!x)layers\.1\d\.[^!]*": 7},
    },
    {"target_modules": ["q_proj"], "rank_pattern": {"proj": 3, "_attn.q_proj": 5, "self_attn.q_proj": 9}},
]


@pytest.mark.parametrize("fields", CONFIGS)
def test_configurations_are_read_as_peft_reads_them(fields: dict[str, Any]) -> None:
    ours = AdapterSettings({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields})
    theirs = LoraConfig(r=4, lora_alpha=8, **fields)
    for name in NAMES:
        assert ours.targets(name) == (
            check_target_module_exists(theirs, name) is True
            or isinstance(check_target_module_exists(theirs, name), re.Match)
        ), name
        assert ours.rank(name) == theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, name), 4), name
        assert ours.alpha(name) == theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern, name), 8), name


@pytest.mark.parametrize("named", ["all-linear", "All-Linear", ["all-linear"], ["all-linear", "lm_head"]])
def test_all_linear(named: Any) -> None:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": named}
    assert all(AdapterSettings(fields).targets(name) for name in NAMES)
    some = AdapterSettings({**fields, "exclude_modules": ["q_proj"]})
    assert [name for name in NAMES if not some.targets(name)] == [name for name in NAMES if name.endswith("q_proj")]
