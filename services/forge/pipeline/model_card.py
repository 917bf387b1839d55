"""Model card: README.md of a forged checkpoint, written from its record. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = {
    "layers": "layers",
    "kv_groups": "KV groups a layer",
    "key_heads": "DeltaNet key heads a layer",
    "mlp_channels": "MLP channels a layer",
}


def model_card(name: str, record: Mapping[str, Any]) -> str:
    """README.md of a checkpoint.

    Args:
        name: title.
        record: contents of forge.json.
    """
    parts = [f"# {name}", _what(record), "## What was cut", _cut(record)]
    if (evaluation := record.get("evaluation")) is not None:
        parts += ["## Quality", _quality(evaluation)]
    parts += ["## How it was made", _made(record), "## Load", _LOAD, "## Check", _CHECK]
    return "\n\n".join(parts) + "\n"


_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```

```bash
temper up --model .
```

Adapters of the model that it was made of do not fit: their digest of the base differs."""
_CHECK = """\
`forge.json` has the recipe, all figures, and the digest of every file. With the signer's public key:

```bash
temper forge verify . --key forge.pub.pem
```"""


def _what(record: Mapping[str, Any]) -> str:
    plan, base = record["plan"], record["base"]
    share = 1 - plan["parameters_after"] / plan["parameters"]
    return (
        f"A smaller model of {base['name']} (digest `{base['digest'][:16]}`), made by Temper's forge: "
        f"{plan['parameters']:,} → {plan['parameters_after']:,} parameters ({share:.1%} fewer), "
        f"{plan['bytes']:,} → {plan['bytes_after']:,} bytes."
    )


def _cut(record: Mapping[str, Any]) -> str:
    rows = [[_UNITS[kind], f"{before:,}", f"{after:,}"] for kind, (before, after) in record["plan"]["shape"].items()]
    return _table(["units", "before", "after"], rows)


def _quality(evaluation: Mapping[str, Any]) -> str:
    rows = []
    for suite, before in evaluation["before"].items():
        after, pair = evaluation["after"][suite], evaluation["compared"].get(suite)
        percent = before["better"] == "higher" and all(0 <= one["mean"] <= 1 for one in (before, after))
        gain = ""
        if pair is not None:
            gain = f"{_number(pair['gain'], percent, sign=True)} {_interval(pair['interval'], percent)}"
        rows.append(
            [
                suite,
                str(before["items"]),
                f"{_number(before['mean'], percent)} {_interval(before['interval'], percent)}",
                f"{_number(after['mean'], percent)} {_interval(after['interval'], percent)}",
                gain,
                "" if pair is None else f"{pair['p']:.2g}",
            ]
        )
    text = (
        "Means with 95 % intervals; the difference is paired item by item, above 0 is better. Answers that cannot be "
        "read count as wrong."
    )
    return f"{text}\n\n{_table(['suite', 'items', 'before', 'after', 'difference', 'p'], rows)}"


def _made(record: Mapping[str, Any]) -> str:
    recipe, data = record["recipe"], record["data"]
    lines = [
        f"- Importance: {recipe['importance']['method']}, in {recipe['prune']['cycles']} cycles.",
        *(f"- Data: {one['name']} (sha256 `{one['sha256'][:16]}`)." for one in data),
    ]
    recover = recipe["recover"]
    if recover is not None:
        lines.append(f"- Recovery: {recover['method']}, {recover['trains']}, at most {recover['steps']} steps a cycle.")
    if recipe["quantize"] is not None:
        lines.append(f"- Matrices: {recipe['quantize']}.")
    return "\n".join(lines)


def _number(value: float, percent: bool, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.1f} %" if percent else f"{value:{plus}.4f}"


def _interval(bounds: Mapping[str, Any] | None, percent: bool) -> str:
    if bounds is None:
        return ""
    low, high = (100 * bounds[end] if percent else bounds[end] for end in ("low", "high"))
    return f"[{low:.1f}, {high:.1f}]" if percent else f"[{low:.4f}, {high:.4f}]"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
