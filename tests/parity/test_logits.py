"""Logits equal transformers', however a prompt is cut, batched, preempted or restored."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from tests.parity.conftest import Pair
from tests.parity.reference import BAR, CHUNKS, CONFIGS, LENGTHS, Driver, Place, prompt, reference_logits

configs = pytest.mark.parametrize("name", CONFIGS)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == torch.float32
    return float((ours - theirs).abs().max())


@pytest.mark.sampled(1)
@configs
def test_prompts_of_every_length_and_chunk(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    driver = Driver(pair.model)
    for length in LENGTHS:
        tokens = prompt(length)
        expected = reference_logits(pair.reference, tokens)
        for chunk in CHUNKS:
            place, logits = driver.prefill(tokens, chunk)
            driver.close(place)
            assert difference(logits, expected) <= BAR, (length, chunk)


@configs
def test_batch_of_mixed_lengths_with_decodes_and_prefills(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    driver = Driver(pair.model, num_slots=12)
    texts = [prompt(length) for length in (*LENGTHS, 90)]
    expected = [reference_logits(pair.reference, tokens) for tokens in texts]
    places: dict[int, Place] = {}
    step = 0
    while any(index not in places or places[index].done < len(text) for index, text in enumerate(texts)):
        if len(places) < len(texts):  # one more joins in each step
            places[len(places)] = driver.open()
        # Odd ones decode token by token after their first chunk, even ones prefill 16 at a time.
        work: list[tuple[int, list[int]]] = []
        for index, place in places.items():
            size = 1 if index % 2 and place.done else 16
            if tokens := texts[index][place.done : place.done + size]:
                work.append((index, tokens))
        work.sort(key=lambda item: not (len(item[1]) == 1 and places[item[0]].done))
        begins = {index: places[index].done for index, _ in work}
        for (index, tokens), logits in zip(work, driver.run([(places[i], t) for i, t in work]), strict=True):
            rows = slice(begins[index], begins[index] + len(tokens))
            assert difference(logits, expected[index][rows]) <= BAR, (step, index)
        step += 1


@configs
def test_preempted_sequence_resumes_by_recomputing(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    driver = Driver(pair.model, num_slots=2)
    tokens = prompt(100)
    expected = reference_logits(pair.reference, tokens)
    place, _ = driver.prefill(tokens[:70], 16)
    driver.run([(place, tokens[70:71])])
    driver.close(place)
    for seed in (1, 2):  # others leave their state in the slots and blocks
        other, _ = driver.prefill(prompt(80, seed=seed), None)
        driver.close(other)
    place, logits = driver.prefill(tokens[:71], None)
    rest = [driver.run([(place, [token])])[0] for token in tokens[71:]]
    assert difference(torch.cat([logits, *rest]), expected) <= BAR


@configs
def test_state_snapshot_restores_a_prefix(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    driver = Driver(pair.model)
    tokens = prompt(90)
    place, _ = driver.prefill(tokens[:64], None)
    snapshot = driver.open()
    pair.model.copy_state(driver.cache, [place.slot], [snapshot.slot])
    driver.run([(place, prompt(20))])  # moves the live state on; blocks 0 to 3 keep the prefix
    pair.model.copy_state(driver.cache, [snapshot.slot], [place.slot])
    place.done = 64
    logits = driver.run([(place, tokens[64:])])[0]
    assert difference(logits, reference_logits(pair.reference, tokens)[64:]) <= BAR


@pytest.mark.sampled(2)
@configs
@torch.no_grad()
def test_greedy_text_is_that_of_generate(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    driver = Driver(pair.model)
    texts = [prompt(length) for length in (5, 33, 64, 70)]
    work = [(driver.open(), tokens) for tokens in texts]
    outputs: list[list[int]] = [[] for _ in texts]
    for _ in range(24):
        chosen = [int(logits[-1].argmax()) for logits in driver.run(work, all_rows=False)]
        for output, token in zip(outputs, chosen, strict=True):
            output.append(token)
        work = [(place, [token]) for (place, _), token in zip(work, chosen, strict=True)]
    for tokens, output in zip(texts, outputs, strict=True):
        expected = pair.reference.generate(
            torch.tensor([tokens]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert output == expected[0, len(tokens) :].tolist()


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pairs: dict[str, Pair]) -> None:
    pair = pairs["grouped"]
    model = type(pair.model).from_directory(pair.path, dtype="bfloat16", device="cpu")
    driver = Driver(model)
    tokens = prompt(70)
    place, logits = driver.prefill(tokens[:50], 16)
    logits = torch.cat([logits, *(driver.run([(place, [token])])[0] for token in tokens[50:])])
    expected = reference_logits(pair.reference, tokens)
    theirs = reference_logits(Qwen3_5ForCausalLM.from_pretrained(pair.path, dtype=torch.bfloat16).eval(), tokens)
    assert float((logits - expected).norm()) <= 1.2 * float((theirs.float() - expected).norm())
