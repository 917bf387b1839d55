"""Pages of cards: every card has its rows, marked as measured or predicted; predictions keep to their rule."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.lib.checkpoints.family import SHAPES
from benchmarks.serving.cards.plans import lightest, quantizations
from benchmarks.serving.cards.rates import REFERENCE, REQUESTS, SMALLER_CUTS, flop_by_byte, prediction, rate, rates
from benchmarks.serving.cards.table import CARDS, Card, card
from docs_tools.card_tables import CARDS_PAGE, SIZING, STORED, cards, sizing
from kernels.gpu.launch.device import architectures, named

# tests/unit/docs/test_generated.py tells whether the pages are current.
PAGE = CARDS_PAGE.read_text()


def table(name: str, page: str = PAGE) -> list[list[str]]:
    """Cells of a generated table, without its head."""
    body = page.split(f"<!-- table: {name} -->\n")[1].split("<!-- /table -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]


@pytest.mark.parametrize("of", CARDS, ids=lambda of: of.name)
def test_every_card_is_marked(of: Card) -> None:
    (row,) = [row for row in table("cards") if row[0] == of.name]
    assert row[5] == ("**measured**" if of.proof == "measured" else "compiled, *predicted*")
    assert of.source in row[3]
    (cells,) = [row[1:] for row in table("rates") if row[0] == of.name]
    keys = [(stored, requests) for stored in STORED for requests in REQUESTS]
    for cell, (stored, requests) in zip(cells, keys, strict=True):
        found = rate(of, stored, requests) if stored in quantizations(of) else None
        assert (found is None) == (cell == "")
        if found is not None:
            assert re.fullmatch(r"\*\*[\d,]+\*\*" if found.measured else r"\*[\d,]+\*", cell), cell
            assert not found.measured or of.proof == "measured"


def test_the_measured_cards_are_those_with_results() -> None:
    measured = {name for (name, _, _), found in rates().items() if found.measured}
    assert measured == {of.name for of in CARDS if of.proof == "measured"}
    assert card(REFERENCE).name in measured


def test_cards_are_those_that_kernels_know() -> None:
    assert {of.architecture for of in CARDS} == set(architectures())
    for architecture in architectures():
        typical = named(architecture)
        same = [of for of in CARDS if of.name.startswith(typical.name.removesuffix(" 80GB"))]
        assert typical.bandwidth in [of.bandwidth * 1e9 for of in same]
        assert typical.memory >= min(of.free_bytes for of in same)


def test_a_prediction_is_its_rule() -> None:
    best = rate(card(REFERENCE), "none", 1)
    found = prediction(card("L4, 24 GB"), "none", 1)
    assert best is not None
    assert found is not None
    assert best.measured
    assert found.share == pytest.approx(best.share * SMALLER_CUTS["small"][1])
    assert found.tokens == pytest.approx(best.tokens * 300 / 3350 * 0.94)
    again = prediction(card(REFERENCE), "none", 1)
    assert again is not None
    assert again.tokens == pytest.approx(best.tokens), "what was measured is predicted"


def test_nothing_is_predicted_beyond_memory() -> None:
    small = replace(card("L4, 24 GB"), name="half an L4", free=11.0)
    assert prediction(card("L4, 24 GB"), "none", 64) is not None
    assert prediction(small, "none", 64) is None
    assert prediction(card("A10G, 24 GB"), "int4", 1) is not None


def test_the_text_says_how_much_is_computed_for_a_byte() -> None:
    many = [round(flop_by_byte(stored, 64)) for stored in STORED]
    assert f"about {round(many[0], -1)} multiplications" in PAGE
    assert f"{many[1]} in fp8 and {many[2]} in int4" in " ".join(PAGE.split())


def test_the_family_has_no_entry_where_it_does_not_fit() -> None:
    rows = {name: row[1:] for row in table("family") for name in row[0].split("; ")}
    for of in CARDS:
        for cell, shape in zip(rows[of.name], SHAPES, strict=True):
            made = lightest(shape, of)
            if made is None:
                assert cell == ""
            else:
                assert cell.startswith(f"{STORED[made.stored]}: {made.sequences}, ")
                assert made.plan.total <= of.free_bytes
    assert "" in rows["L4, 24 GB"]
    assert "" not in rows["H100, 80 GB"]


def test_sizing_has_every_card_and_each_way_to_store() -> None:
    rows = table("plans", SIZING.read_text())
    found = {(name, row[2]) for row in rows for name in row[0].split("; ")}
    assert found == {(of.name, STORED[stored]) for of in CARDS for stored in quantizations(of)}
    assert not [row for row in rows if "does not fit" in row]


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- table: plans -->"):
        sizing("# Sizing\n")
    with pytest.raises(ValueError, match="<!-- table: cards -->"):
        cards(SIZING.read_text())


@pytest.mark.parametrize("wrong", [{"architecture": "sm75"}, {"free": 0.0}, {"source": "a shop"}], ids=str)
def test_a_card_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="L4"):
        replace(card("L4, 24 GB"), **wrong)  # type: ignore[arg-type]
