"""Which engine gets a request: what must hold for all loads, prompts and engines."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.pb import engine_pb2
from services.gateway.engines.load_balancing import (
    Affinity,
    Candidate,
    Route,
    allowance,
    attracts,
    choose,
    route_of,
    share,
)
from services.gateway.engines.prefix_index import BLOCK_TOKENS, Prediction, PrefixIndex, hash_chain, joined

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.integers(0, 99).map(lambda number: f"10.0.0.{number}:50051"),
        st.floats(0, 1000),
        st.booleans(),
        st.integers(0, 200),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.address,
)
ROUTES = st.builds(Route, st.binary(max_size=8), st.just(()), st.integers(1, 1000), st.sampled_from(["", "bot@1"]))


def request(tokens: list[int], *, adapter: str = "", salt: str = "") -> engine_pb2.GenerateRequest:
    ref = engine_pb2.AdapterRef(attached=True)
    if adapter:
        ref = engine_pb2.AdapterRef(named=engine_pb2.NamedAdapter(name=adapter, version=1))
    return engine_pb2.GenerateRequest(prompt_token_ids=tokens, adapter=ref, cache_salt=salt)


def route(tokens: list[int], *, adapter: str = "", salt: str = "", affinity: Affinity | None = None) -> Route:
    return route_of(request(tokens, adapter=adapter, salt=salt), tokens, affinity or Affinity())


@settings(max_examples=40)
@given(CANDIDATES, ROUTES, st.none() | st.text(max_size=8))
def test_the_chosen_engine_has_room(candidates: list[Candidate], route: Route, session: str | None) -> None:
    address, reason = choose(candidates, route, new_session=session)
    chosen = next(candidate for candidate in candidates if candidate.address == address)
    assert chosen.load < share(candidates) + allowance(chosen, named=bool(route.adapter))
    assert chosen.load <= share(candidates) or chosen.matched or (route.adapter and (chosen.holds or chosen.expects))
    if session is not None:
        assert reason == "session"
    elif reason == "prefix":
        assert attracts(chosen, min(candidate.load for candidate in candidates))
    elif reason == "adapter":
        assert chosen.holds or chosen.expects


@settings(max_examples=40)
@given(CANDIDATES, ROUTES, st.randoms())
def test_the_order_of_engines_does_not_matter(candidates: list[Candidate], route: Route, rng: random.Random) -> None:
    shuffled = rng.sample(candidates, len(candidates))
    assert choose(shuffled, route) == choose(candidates, route)


@settings(max_examples=40)
@given(CANDIDATES, ROUTES)
def test_an_engine_with_room_that_has_more_of_the_prompt_is_not_passed_over(
    candidates: list[Candidate], route: Route
) -> None:
    address, _ = choose(candidates, route)
    chosen = next(candidate for candidate in candidates if candidate.address == address)
    roomy = [c for c in candidates if c.load < share(candidates) + allowance(c, named=bool(route.adapter))]
    if route.adapter and any(c.holds for c in roomy):
        assert chosen.holds
        roomy = [c for c in roomy if c.holds]
    elif route.adapter and any(c.expects for c in roomy):
        assert chosen.expects
        roomy = [c for c in roomy if c.expects]
    least = min(c.load for c in roomy)
    worth = [c for c in roomy if attracts(c, least)]
    if worth:
        assert chosen.matched == max(c.matched for c in worth)
        assert chosen.load == min(c.load for c in worth if c.matched == chosen.matched)


@settings(max_examples=40)
@given(st.integers(2, 12), st.binary(max_size=16))
def test_an_engine_that_goes_moves_nothing_but_its_own(engines: int, key: bytes) -> None:
    idle = [Candidate(f"10.0.0.{number}:1", 0.0) for number in range(engines)]
    where = Route(key, (), 10, "")
    address, _ = choose(idle, where)
    for gone in idle:
        left = [candidate for candidate in idle if candidate is not gone]
        if gone.address != address:
            assert choose(left, where)[0] == address


@pytest.mark.parametrize("adapter", ["", "bot"])
def test_one_hot_prompt_or_adapter_spreads_at_the_bound(adapter: str) -> None:
    tokens = list(range(4 * BLOCK_TOKENS))
    where = route(tokens, adapter=adapter)
    loads: Counter[str] = Counter()
    indexes = {f"e{number}": PrefixIndex(100) for number in range(4)}
    holding: set[str] = set()
    for count in range(1, 401):
        found = [
            Candidate(name, loads[name], name in holding, index.matched(where.chain)) for name, index in indexes.items()
        ]
        chosen = next(c for c in found if c.address == choose(found, where)[0])
        loads[chosen.address] += 1
        indexes[chosen.address].add(where.chain)
        holding.add(chosen.address)
        assert loads[chosen.address] <= math.ceil(1.25 * count / 4 + allowance(chosen, named=bool(adapter))) + 1
        if count <= 2:
            assert len(loads) == 1, "a few stay together: what is there is worth more than an idle engine"
    assert len(loads) == 4
    assert max(loads.values()) <= 1.25 * 400 / 4 + (10 if adapter else 6)


def test_requests_wait_together_for_an_adapter_that_is_on_its_way() -> None:
    """What waits computes nothing: another engine would only ask the store for the same bytes. One that has the adapter
    is better, where it has room."""
    where = route([1] * 40, adapter="bot")
    idle = [Candidate(f"e{number}", 1.0) for number in range(4)]
    loading = Candidate("loading", 200.0, expects=True)
    assert choose([*idle, loading], where) == ("loading", "adapter")
    assert choose([*idle, loading, Candidate("loaded", 2.0, holds=True)], where) == ("loaded", "adapter")
    assert choose([*idle, loading, Candidate("loaded", 100.0, holds=True)], where) == ("loading", "adapter")
    assert choose([*idle, replace(loading, load=400.0)], where)[1] == "hash", "a queue that long is worth a second load"
    assert choose([*idle, loading], route([1] * 40))[1] == "hash", "others do not wait there"


@pytest.mark.parametrize(("blocks", "stays"), [(1, False), (100, True)])
def test_what_all_prompts_begin_with_attracts_nobody_past_an_idle_engine(blocks: int, stays: bool) -> None:
    """All gateways hear at once that an engine has the beginning, and so far of one request there: if it were enough,
    all would send theirs. A longer one is worth going behind that request for."""
    where = route(list(range(blocks * BLOCK_TOKENS)))
    told = Candidate("told", 3.0, matched=blocks)
    others = [Candidate(f"e{number}", load) for number, load in enumerate([0.0] * 3 + [20.0] * 3)]
    address, reason = choose([told, *others], where)
    assert reason == ("prefix" if stays else "hash")
    assert address == "told" or not stays


def test_a_match_is_worth_the_work_it_saves() -> None:
    long = route(list(range(100 * BLOCK_TOKENS)))
    short = route(list(range(BLOCK_TOKENS)))
    for where, stays in ((long, True), (short, False)):
        busy = Candidate("busy", 8.0, matched=len(where.chain))
        assert (choose([busy, Candidate("idle", 0.0)], where)[0] == "busy") is stays


def test_what_shares_no_cache_has_no_common_hash() -> None:
    tokens = list(range(3 * BLOCK_TOKENS + 5))
    chains = [
        route(tokens).chain,
        route(tokens, salt="a").chain,
        route(tokens, adapter="bot").chain,
        route(tokens, adapter="bot", salt="a").chain,
        route([7, *tokens[1:]]).chain,
    ]
    assert all(len(chain) == 3 for chain in chains)
    assert len({block for chain in chains for block in chain}) == 15
    assert route([*tokens, 1]).chain == route(tokens).chain
    assert route(tokens).key == route(tokens[: 2 * BLOCK_TOKENS]).key, "the key is of the beginning"


def test_a_cache_key_takes_the_place_of_the_beginning() -> None:
    one, two = list(range(200)), list(range(500, 700))
    key = Affinity(cache_key="mine")
    assert route(one).key != route(two).key
    assert route(one, affinity=key).key == route(two, affinity=key).key
    assert route(one, adapter="bot", affinity=key).key == route(two, adapter="bot").key


BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=40)
@given(st.lists(BLOCKS, min_size=1, max_size=30), st.integers(1, 12))
def test_the_index_knows_beginnings_and_stays_within_its_bounds(prompts: list[list[int]], capacity: int) -> None:
    index = PrefixIndex(capacity)
    chains = [hash_chain([token for token in prompt for _ in range(BLOCK_TOKENS)], b"") for prompt in prompts]
    for chain in chains:
        index.add(chain)
        assert len(index) <= capacity
        assert index.matched(chain) == min(len(chain), capacity), "the newest is known"
        for other in chains:
            known = [block in index._blocks for block in other]
            assert known == sorted(known, reverse=True), "of a prompt its beginning is known"
            assert index.matched(other) == sum(known)
    index.clear()
    assert not any(map(index.matched, chains))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=3 * BLOCK_TOKENS), st.integers(0, 3 * BLOCK_TOKENS))
def test_chains_agree_as_far_as_prompts_do(tokens: list[int], at: int) -> None:
    changed = [*tokens[:at], *(token ^ 1 for token in tokens[at : at + 1]), *tokens[at + 1 :]]
    one, two = hash_chain(tokens, b"s"), hash_chain(changed, b"s")
    equal = min(at // BLOCK_TOKENS, len(one)) if changed != tokens else len(one)
    assert one[:equal] == two[:equal]
    assert not set(one[equal:]) & set(two[equal:])


def test_senseless_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="no engine"):
        choose([], Route(b"", (), 1, ""))
    with pytest.raises(ValueError, match="load"):
        Candidate("e", float("inf"))
    with pytest.raises(ValueError, match="capacity"):
        PrefixIndex(0)


# -- what engines tell of their caches


def chain(*blocks: int) -> tuple[bytes, ...]:
    return hash_chain([token for token in blocks for _ in range(BLOCK_TOKENS)], b"")


def routed(index: PrefixIndex, *blocks: int, hit: int | None = None) -> Prediction:
    """A prompt of these blocks and a little more, of which the engine had ``hit`` tokens; None: it has not said it."""
    prediction = index.route(chain(*blocks), BLOCK_TOKENS * len(blocks) + 7)
    if hit is not None:
        index.told(prediction, hit)
    return prediction


def test_a_lost_beginning_is_forgotten_with_what_lies_behind() -> None:
    index = PrefixIndex(100)
    routed(index, 1, 2, 3, 4, 5, hit=0)
    routed(index, 1, 2, 6, hit=2 * BLOCK_TOKENS)
    routed(index, 9, 9, hit=0)
    assert routed(index, 1, 2, 7).certain == 2
    index.told(index.route(chain(1, 2, 8), 3 * BLOCK_TOKENS + 1), 0)
    assert index.matched(chain(1, 2, 3, 4, 5)) == 2, "it was last used before what is gone now"
    assert index.matched(chain(1, 2, 6)) == 2
    assert index.matched(chain(1, 2, 8)) == 3, "that is being computed"
    assert index.matched(chain(1, 2, 7)) == 3, "and so was this, since"
    assert index.matched(chain(9, 9)) == 2, "that is another story"
    assert routed(index, 1, 2, 5).certain == 0, "nothing is certain there any more"


def test_a_part_that_is_lost_leaves_the_rest() -> None:
    index = PrefixIndex(100)
    routed(index, 1, 2, 3, 4, hit=0)
    routed(index, 1, 5, hit=BLOCK_TOKENS)
    routed(index, 1, 2, 3, 4, 6, hit=4 * BLOCK_TOKENS)
    routed(index, 1, 2, 3, 7, hit=BLOCK_TOKENS)
    assert index.matched(chain(1, 2, 3, 4, 6)) == 5, "no hit was told of the place where the prompts part"
    assert routed(index, 1, 2, 3, 4, 8, hit=BLOCK_TOKENS).certain == 4
    assert index.matched(chain(1, 2, 3, 4, 6)) == 4
    assert index.matched(chain(1, 2, 3, 7)) == 4
    assert index.matched(chain(1, 5)) == 2, "the beginning is still there, and so is what parts there"


def test_what_is_being_computed_cannot_be_missed() -> None:
    index = PrefixIndex(100)
    waiting = [routed(index, 1, 2, 3, number) for number in range(4, 8)]
    assert all(one.certain == 0 for one in waiting)
    for one in waiting:
        index.told(one, 0)
    assert all(index.matched(one.chain) == 4 for one in waiting)
    # One that was asked before a hit was told says nothing about what was told since.
    early = routed(index, 1, 2, 3, 9, hit=3 * BLOCK_TOKENS)
    late = [routed(index, 1, 2, 3, number) for number in (10, 11)]
    index.told(late[0], 0)
    routed(index, 1, 2, 3, 12, hit=3 * BLOCK_TOKENS)
    index.told(late[1], 0)
    assert routed(index, 1, 2, 3, 13).certain == 3
    assert early.certain == 0


def test_a_hit_inside_a_block_is_of_prompts_that_have_all_of_it() -> None:
    index = PrefixIndex(100)
    routed(index, 1, 2, 3, hit=0)
    routed(index, 1, 2, 4, hit=BLOCK_TOKENS + 16)
    assert routed(index, 1, 5, hit=0).certain == 0
    assert routed(index, 1, 2, 6).certain == 2
    # A prompt that ends with the block cannot be hit at its end.
    assert index.route(chain(1, 2), 2 * BLOCK_TOKENS).certain == 0
    routed(index, 1, 2, 7, hit=BLOCK_TOKENS + 1)
    assert index.matched(chain(1, 2, 3)) == 3, "how much of the block it was says nothing"


@settings(max_examples=60)
@given(st.lists(st.tuples(BLOCKS, st.integers(0, 7 * BLOCK_TOKENS), st.booleans()), min_size=1, max_size=30), st.data())
def test_the_index_stays_one_of_beginnings_whatever_is_told(
    prompts: list[tuple[list[int], int, bool]], data: st.DataObject
) -> None:
    index = PrefixIndex(data.draw(st.integers(1, 20)))
    open_: list[Prediction] = []
    seen: list[tuple[bytes, ...]] = []
    for blocks, hit, at_once in prompts:
        open_.append(routed(index, *blocks))
        seen.append(open_[-1].chain)
        if at_once or len(open_) > 3:
            index.told(open_.pop(data.draw(st.integers(0, len(open_) - 1))), hit)
        known = {block for other in seen for block in other if block in index._blocks}
        assert len(known) == len(index)
        for other in seen:
            present = [block in known for block in other]
            assert present == sorted(present, reverse=True)
        linked = [child for block in index._blocks.values() for child in block.children()]
        assert sorted(linked) == sorted(name for name, block in index._blocks.items() if block.parent is not None)


def test_what_other_gateways_sent_is_known_once_the_engine_has_told_it() -> None:
    mine, theirs = PrefixIndex(100), PrefixIndex(100)
    prompt = chain(1, 2, 3)
    mine.route(prompt, 3 * BLOCK_TOKENS)
    theirs.heard([joined(prompt)])
    assert theirs.matched(chain(1, 2, 4)) == 2
    mine.heard([joined(prompt)])
    assert (len(mine), mine.matched(prompt)) == (3, 3), "its own is no news"
