"""Tables of docs/guides/cards.md and docs/guides/sizing.md: what cards hold and how fast they decode.

The text around them is written by hand; the tables are what the engine's own planner and benchmarks/results say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from benchmarks.lib.checkpoints.family import SHAPES
from benchmarks.serving.cards.plans import lightest, planned, quantizations
from benchmarks.serving.cards.rates import REQUESTS, SHAPE, Rate, prediction, rates
from benchmarks.serving.cards.table import CARDS, Card
from docs_tools.paths import DOCS
from services.engine.models.footprint import Quantization

SIZING = DOCS / "guides" / "sizing.md"
CARDS_PAGE = DOCS / "guides" / "cards.md"
STORED: Mapping[Quantization, str] = {"none": "bf16", "fp8": "fp8", "int4": "int4"}
"""Names of the ways to store weights."""
_GIB = 2**30
_END = "<!-- /table -->\n"


def sizing(page: str) -> str:
    """The page of sizing with its table as it should be now."""
    return _filled(page, {"plans": _plans()})


def cards(page: str) -> str:
    """The page of cards with its tables as they should be now."""
    found = rates()
    return _filled(
        page,
        {"cards": _cards(), "rates": _rates(found), "check": _check(found), "family": _family()},
    )


def _filled(page: str, tables: Mapping[str, Iterable[str]]) -> str:
    """The page with each table between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    for name, rows in tables.items():
        begin = f"<!-- table: {name} -->\n"
        before, found, rest = page.partition(begin)
        _, end, after = rest.partition(_END)
        if not found or not end:
            raise ValueError(f"the page needs the lines {begin.strip()!r} and {_END.strip()!r}")
        page = "".join((before, begin, *(f"{row}\n" for row in rows), end, after))
    return page


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = tuple(columns)
    yield _line(names)
    yield "|---" * len(names) + "|"
    yield from map(_line, rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _alike() -> Iterator[tuple[str, Card]]:
    """Names of cards whose memory plans are the same, and one of them."""
    alike: dict[tuple[float, bool], list[Card]] = {}
    for card in CARDS:
        alike.setdefault((card.free, card.device.has_float8), []).append(card)
    for same in alike.values():
        yield "; ".join(card.name for card in same), same[0]


def _plans() -> Iterator[str]:
    columns = (
        *("card", "free", "stored", "weights", "sequences", "states", "adapters", "other", "KV"),
        *("tokens of context", "training", "a job's longest document"),
    )
    return _table(columns, _plan_rows())


def _plan_rows() -> Iterator[tuple[str, ...]]:
    for names, card in _alike():
        for stored in quantizations(card):
            made = planned(SHAPE, card, stored)
            if made is None:
                yield (names, f"{card.free:g}", STORED[stored], "does not fit", *[""] * 8)
                continue
            plan = made.plan
            other = plan.workspace + plan.sampler + plan.graphs
            yield (
                *(names, f"{card.free:g}", STORED[stored], _gib(plan.weights), str(made.sequences)),
                *map(_gib, (plan.states, plan.adapters, other, plan.kv)),
                *(f"{made.context:,}", _gib(plan.training), f"{made.longest_document():,}"),
            )


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"


def _cards() -> Iterator[str]:
    columns = ("card", "architecture", "GiB free", "GB/s", "stored as", "proof", "largest in bf16", "largest at all")
    rows = (
        (
            *(card.name, card.architecture, f"{card.free:g}", f"[{card.bandwidth:,}]({card.source})"),
            ", ".join((*(STORED[stored] for stored in quantizations(card)), *["KV fp8"] * card.device.has_float8)),
            "**measured**" if card.proof == "measured" else "compiled, *predicted*",
            *_largest(card),
        )
        for card in CARDS
    )
    return _table(columns, rows)


def _largest(card: Card) -> tuple[str, str]:
    """Largest model that the card holds in bf16, and at all."""
    fitting = {_size(shape): made.stored for shape in SHAPES if (made := lightest(shape, card)) is not None}
    plain = [size for size, stored in fitting.items() if stored == "none"]
    *_, (size, stored) = fitting.items()
    return plain[-1] if plain else "none", f"{size}, {STORED[stored]}"


def _size(shape: str) -> str:
    return shape.removeprefix("qwen3.5-").upper()


def _rates(found: Mapping[tuple[str, Quantization, int], Rate]) -> Iterator[str]:
    columns = ("card", *(f"{STORED[stored]}, c={requests}" for stored in STORED for requests in REQUESTS))
    rows = (
        (card.name, *(_rate(found.get((card.name, stored, requests))) for stored in STORED for requests in REQUESTS))
        for card in CARDS
    )
    return _table(columns, rows)


def _rate(rate: Rate | None) -> str:
    """A measured rate as it is; a predicted one in italics, to two digits; nothing where there is none."""
    if rate is None:
        return ""
    return f"**{rate.tokens:,.0f}**" if rate.measured else f"*{float(f'{rate.tokens:.2g}'):,.0f}*"


def _check(found: Mapping[tuple[str, Quantization, int], Rate]) -> Iterator[str]:
    """Both of the H200: the one card besides the H100 whose rates are known."""
    columns = ("H200", "measured", "of the floor", "the rule says", "too high by")
    return _table(columns, _check_rows(found))


def _check_rows(found: Mapping[tuple[str, Quantization, int], Rate]) -> Iterator[tuple[str, ...]]:
    card = next(card for card in CARDS if card.name.startswith("H200"))
    for (name, stored, requests), rate in found.items():
        predicted = prediction(card, stored, requests)
        if name == card.name and rate.measured and predicted is not None:
            yield (
                *(f"{STORED[stored]}, c={requests}", f"**{rate.tokens:,.0f}**", f"{100 * rate.share:.0f} %"),
                *(f"*{predicted.tokens:,.0f}*", f"{100 * (predicted.tokens / rate.tokens - 1):.0f} %"),
            )


def _family() -> Iterator[str]:
    rows = ((names, *(_fits(shape, card) for shape in SHAPES)) for names, card in _alike())
    return _table(("card", *map(_size, SHAPES)), rows)


def _fits(shape: str, card: Card) -> str:
    made = lightest(shape, card)
    return "" if made is None else f"{STORED[made.stored]}: {made.sequences}, {made.context // 1000:,}k"
