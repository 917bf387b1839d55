"""Reading names and labels out of expressions."""

from __future__ import annotations

import pytest

from observability.promql import asked


@pytest.mark.parametrize(
    ("expression", "names", "grouped"),
    [
        ("up", ["up"], set()),
        ('up{job="a",pod=~"b|c"} == 0', ["up"], set()),
        ("sum by (pod, le) (rate(x_bucket[5m]))", ["x_bucket"], {"pod", "le"}),
        ("sum(rate(vllm:a_total[$__rate_interval])) by (pod)", ["vllm:a_total"], {"pod"}),
        ("time() - a > 5\nand on (namespace) b == 1", ["a", "b"], {"namespace"}),
        ("a / ignoring (kind) b offset 5m", ["a", "b"], {"kind"}),
        ("histogram_quantile(0.95, sum by (le) (rate(h_bucket[1h])))", ["h_bucket"], {"le"}),
        ('absent(up{component="x"}) or vector(0)', ["up"], set()),
        ("0 * count without (a) (b)", ["b"], {"a"}),
        ('a{text="by (x) {y}"}', ["a"], set()),
    ],
)
def test_names_and_lists(expression: str, names: list[str], grouped: set[str]) -> None:
    found = asked(expression)
    assert [selector.name for selector in found.selectors] == names
    assert found.grouped == grouped


def test_matchers() -> None:
    (selector,) = asked('x{a="1",b!="2",c=~"3,4",d!~"5"}').selectors
    assert selector.matchers == (("a", "=", "1"), ("b", "!=", "2"), ("c", "=~", "3,4"), ("d", "!~", "5"))
    assert selector.labels == {"a", "b", "c", "d"}


def test_what_is_no_promql() -> None:
    with pytest.raises(ValueError, match="from here on: '; drop'"):
        asked("up; drop")
