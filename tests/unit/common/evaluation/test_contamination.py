"""Contamination: what is found in training data, in whatever form a job has them, and whose data are not known."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

from services.common.adapters.manifest import Lineage, LineageParent
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.errors import Unavailable
from services.common.evaluation.contamination import store as hash_store
from services.common.evaluation.contamination.hashes import TextHasher, prompt_hashes, whole_prompt, words
from services.common.evaluation.contamination.overlap import WORDING, ItemOverlap, SuiteOverlap
from services.common.evaluation.contamination.report import Contamination, contamination
from services.common.evaluation.contamination.store import DataSource, TrainingHashes
from services.common.evaluation.contamination.texts import ReadText, Turn, training_texts
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import JOBS, JobBase, Spec
from services.common.jobs.registry import JobSpec
from services.common.storage.object_store import ObjectStore
from services.common.text.tokenizer import TextCodec
from tests.tokenizer_support import qwen_like_tokenizer
from tests.unit.gateway.fake_stores import MemoryStore

LONG = "A baker has seventy two loaves in the morning and sells every third one before noon, how many are left?"
SHORT = "What is 12 plus 7?"
FIRST_GRAM, LAST_GRAM, PROMPT = 784540779990987707, 6284777111103017216, 15663021152569862220
"""Hashes of LONG with the answer 48. They are kept beside versions: other ones would find nothing there."""
EXACT = SuiteSettings.model_validate({"scorer": {"type": "exact"}})


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(qwen_like_tokenizer())


def job(kind: str, **fields: Any) -> Spec:
    return TypeAdapter(JobSpec).validate_python({"kind": kind, "adapter": "a", **fields})


def items(*rows: dict[str, Any]) -> list[SuiteItem]:
    return [SuiteItem.model_validate({"id": str(place), **row}) for place, row in enumerate(rows)]


def overlaps(suite: list[SuiteItem], texts: list[ReadText]) -> list[ItemOverlap]:
    hasher = TextHasher()
    return SuiteOverlap(suite).find(map(prompt_hashes, texts), map(hasher.grams, texts))


def test_words_are_compared_without_case_punctuation_and_spaces() -> None:
    assert words("  The CAFÉ’s  “ﬁrst_one”:\t3.5% ") == ["the", "café", "s", "first", "one", "3", "5"]
    assert words("東京は2つ。") == ["東", "京", "は", "2", "つ"]


def test_hashes_are_those_of_every_release() -> None:
    text = ReadText.answered((Turn("user", LONG),), ("48",))
    grams = list(TextHasher().grams(text))
    assert (len(grams), len(set(grams))) == (len(words(LONG)) + 1 - 12, len(grams))
    assert (grams[0], grams[-1]) == (FIRST_GRAM, LAST_GRAM)
    assert whole_prompt(text) == PROMPT
    assert prompt_hashes(text) == {PROMPT}


def test_the_same_prompt_is_found_however_it_is_written_and_answered() -> None:
    suite = items({"prompt": SHORT}, {"prompt": "What is 12 plus 8?"}, {"prompt": "?!"})
    training = [ReadText.answered((Turn("user", "what is  12 PLUS 7"),), ("20",))]
    assert [one.exact for one in overlaps(suite, training)] == [True, False, False]
    assert [one.grams for one in overlaps(suite, training)] == [0, 0, 0]


def test_a_system_prompt_of_the_training_does_not_hide_a_question() -> None:
    system = {"role": "system", "content": "You are Max."}
    other = {"role": "system", "content": "You are Eve."}
    user = {"role": "user", "content": SHORT}
    suite = items({"prompt": SHORT}, {"messages": [system, user]}, {"messages": [other, user]})
    training = [ReadText.answered((Turn("system", "You are Max."), Turn("user", SHORT)), ("19",))]
    assert [one.exact for one in overlaps(suite, training)] == [True, True, False]


def test_a_part_of_a_text_is_found_by_thirteen_words() -> None:
    suite = items({"prompt": LONG, "expected": "48"}, {"prompt": LONG.replace("sells", "buys"), "expected": "48"})
    inside = ReadText((Turn("", f"Once upon a time. {LONG.upper()} Nobody knew."),), (1,))
    whole, changed = overlaps(suite, [inside])
    assert (whole.exact, whole.shared, whole.contaminated) == (False, whole.grams - 1, True), "all but the answer"
    assert (changed.shared, changed.contaminated) == (0, False), "each 13 words in a row hold the other verb"
    answered = ReadText.answered((Turn("user", LONG),), ("48",))
    assert overlaps(suite, [answered])[0].share == 1.0


def test_what_many_items_share_is_the_wording_of_the_suite() -> None:
    ask = "Read the following sentence with care and then give back its three facts as one JSON object: "
    training = [ReadText.answered((Turn("user", ask + "Nora is in Rome."),), ("{}",))]
    many = items(*({"prompt": f"{ask}{number} is a number."} for number in range(WORDING + 1)))
    assert not any(one.contaminated for one in overlaps(many, training))
    few = many[:WORDING]
    assert all(one.contaminated for one in overlaps(few, training))
    variants = [item.model_copy(update={"group": "one"}) for item in many]
    assert all(one.contaminated for one in overlaps(variants, training)), "variants of one problem are one"


@pytest.mark.parametrize(
    ("spec", "prompts"),
    [
        (job("sft", examples=[{"prompt": SHORT, "completion": "19"}]), [SHORT]),
        (job("sft", examples=[{"text": LONG}]), [LONG]),
        (
            job(
                "sft",
                examples=[
                    {
                        "messages": [
                            {"role": "user", "content": SHORT},
                            {"role": "assistant", "content": "19"},
                            {"role": "user", "content": LONG},
                            {"role": "assistant", "content": "48"},
                        ]
                    }
                ],
            ),
            [SHORT, f"{SHORT} 19 {LONG}"],
        ),
        (job("dpo", examples=[{"prompt": SHORT, "chosen": "19", "rejected": "20"}]), [SHORT]),
        (
            job(
                "kto",
                examples=[
                    {"prompt": SHORT, "completion": "19", "label": True},
                    {"prompt": LONG, "completion": "1", "label": False},
                ],
            ),
            [SHORT, LONG],
        ),
        (job("opd", teacher="base", rounds=1, max_tokens=9, prompts=[SHORT]), [SHORT]),
        (
            job(
                "grpo",
                generate={
                    "prompts": [{"prompt": SHORT, "answer": 19}],
                    "rounds": 1,
                    "max_tokens": 9,
                    "reward": {"type": "exact"},
                },
            ),
            [SHORT],
        ),
        (job("grpo", prompt=SHORT, completions=["19", "20"], rewards=[1, 0]), [SHORT]),
    ],
)
def test_each_kind_of_job_says_what_it_learns_from(spec: Spec, prompts: list[str], codec: TextCodec) -> None:
    texts = list(training_texts(spec, codec))
    suite = items(*({"prompt": prompt} for prompt in prompts), {"prompt": "Something else?"})
    assert [one.exact for one in overlaps(suite, texts)] == [*[True] * len(prompts), False]


def test_no_kind_of_training_job_is_forgotten(codec: TextCodec) -> None:
    for kind, model in JOBS.items():
        if issubclass(model, JobBase):
            for example in model.request_examples.values():
                spec = cast("Spec", model.model_validate({"kind": kind, **example}))
                # A merge learns nothing, and a drafter changes no answer.
                assert kind in ("merge", "draft") or list(training_texts(spec, codec)), kind


def test_references_and_completions_count_and_held_out_examples_do_not(codec: TextCodec) -> None:
    reference = f"{LONG} That is so because a third of seventy two is twenty four."
    sampled = {
        "prompts": [{"prompt": SHORT, "answer": reference}],
        "eval_prompts": [{"prompt": "Held out?", "answer": "1"}],
        "rounds": 1,
        "max_tokens": 9,
        "reward": {"type": "contains"},
    }
    suite = items({"prompt": LONG}, {"prompt": "Held out?"})
    found = overlaps(suite, list(training_texts(job("grpo", generate=sampled), codec)))
    assert [one.contaminated for one in found] == [True, False]
    pairs = job("dpo", examples=[{"prompt": SHORT, "chosen": "19", "rejected": reference}])
    assert overlaps(suite, list(training_texts(pairs, codec)))[0].contaminated
    examples = [{"prompt": f"{number}?", "completion": "x"} for number in range(4)]
    half = list(training_texts(job("sft", examples=examples, eval_fraction=0.5), codec))
    assert len(half) == 2


def test_rollouts_by_completion_id_come_as_tokens_and_are_cut_into_turns(codec: TextCodec) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SHORT}]
    tokens = codec.encode_chat(turns)
    one, other = codec.encode("19"), codec.encode("20")
    completions = [{"token_ids": one, "reward": 1}, {"token_ids": other, "reward": 0}]
    texts = list(training_texts(job("grpo", groups=[{"prompt_token_ids": tokens, "completions": completions}]), codec))
    assert texts[0].turns == (Turn("system", "Be brief."), Turn("user", SHORT), Turn("assistant", "19"))
    assert overlaps(items({"prompt": SHORT}, {"messages": turns}), texts)[0].exact


class Lab:
    """Adapters, suites and hashes over one store in memory."""

    def __init__(self, codec: TextCodec) -> None:
        self.memory = MemoryStore()
        store = cast("ObjectStore", self.memory)
        self.registry = AdapterRegistry(store, "base")
        self.hashes = TrainingHashes(self.registry)
        self.suites = SuiteStore(store)
        self._codec = codec
        self._jobs = 0

    def learn(
        self, name: str, prompt: str, parent: AdapterVersion | None = None, *, keeps: bool = True
    ) -> AdapterVersion:
        """A version that learnt one prompt; ``keeps``: False of an earlier release."""
        self._jobs += 1
        spec = job("sft", adapter=name, examples=[{"prompt": prompt, "completion": "yes"}])
        if keeps:
            source = DataSource(adapter=name, job_id=f"j{self._jobs}")
            texts = training_texts(spec, self._codec)
            self.hashes.write(source, "sft", [] if parent is None else [parent], texts)
        return self.publish(name, f"j{self._jobs}", parent=None if parent is None else str(parent))

    def publish(self, name: str, job_id: str | None, **origin: Any) -> AdapterVersion:
        files = {WEIGHTS: name.encode(), CONFIG: json.dumps({"r": 1}).encode()}
        return self.registry.publish(name, files, base_digest="b", job_id=job_id, **origin).ref

    def compare(self, version: AdapterVersion, *prompts: str) -> Contamination:
        suite = self.suites.create("s", EXACT, items(*({"prompt": prompt, "expected": "1"} for prompt in prompts)))
        return contamination(self.suites, self.hashes, suite, version)


@pytest.fixture
def lab(codec: TextCodec) -> Lab:
    return Lab(codec)


def ids(found: Contamination) -> list[str]:
    return [one.id for one in found.contaminated]


def test_a_lineage_is_compared_without_its_versions(lab: Lab) -> None:
    first = lab.learn("math", "One?")
    second = lab.learn("math", "Two?", first)
    third = lab.learn("other", LONG, second)
    found = lab.compare(third, "One?", "Two?", LONG, "Three?")
    assert (ids(found), found.exact, found.jobs, found.unknown) == (["0", "1", "2"], 3, 3, ())
    assert ids(lab.compare(first, "One?", "Two?", LONG)) == ["0"]
    for key in lab.memory.list("adapters/math/versions/"):  # retention
        lab.memory.delete(key)
    assert ids(lab.compare(third, "One?", "Two?", LONG, "Three?")) == ["0", "1", "2"]
    clean = lab.compare(third, "Nine?")
    assert clean.clean


def test_a_merge_learnt_what_its_sources_did(lab: Lab) -> None:
    one, other = lab.learn("a", "One?"), lab.learn("b", "Two?")
    lab.hashes.write(DataSource(adapter="m", job_id="merge"), "merge", [one, other], ())
    parents = tuple(LineageParent(version=str(ref), weight=0.5, digest="d") for ref in (one, other))
    merged = lab.publish("m", "merge", lineage=Lineage(method="linear", parents=parents))
    assert ids(lab.compare(merged, "One?", "Two?", "Three?")) == ["0", "1"]


def test_what_is_not_known_is_said(lab: Lab) -> None:
    known = lab.learn("a", "One?")
    earlier = lab.learn("a", "Two?", known, keeps=False)
    uploaded = lab.publish("up", None)
    child = lab.learn("a", "Three?", earlier)
    found = lab.compare(child, "One?", "Two?", "Three?")
    assert (ids(found), found.unknown, found.clean) == (["0", "2"], (str(earlier),), False)
    assert lab.compare(lab.learn("b", "Four?", uploaded), "One?").unknown == (str(uploaded),)
    assert lab.compare(uploaded, "One?").unknown == (str(uploaded),)
    grandchild = lab.learn("c", "Five?", child)
    for key in lab.memory.list("adapters/a/"):  # the adapter was deleted
        lab.memory.delete(key)
    found = lab.compare(grandchild, "One?", "Five?")
    assert (ids(found), found.jobs) == (["1"], 1)
    assert set(found.unknown) == {str(earlier), "job j1 of a", "job j3 of a"}


def test_large_data_are_kept_in_pieces(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_store, "PIECE_HASHES", 16)
    texts = [ReadText.answered((Turn("user", f"{number} {LONG}"),), ("x",)) for number in range(40)]
    source = DataSource(adapter="big", job_id="j")
    record = lab.hashes.write(source, "sft", [], texts)
    assert (record.documents, record.pieces["prompts"] > 1, record.pieces["grams"] > 1) == (40, True, True)
    kept = {one for piece in lab.hashes.read([source], "grams") for one in piece}
    assert kept == {gram for text in texts for gram in TextHasher().grams(text)}


def test_a_store_that_is_away_is_no_clean_suite(lab: Lab) -> None:
    version = lab.learn("a", "One?")
    lab.compare(version, "One?")
    lab.memory.down = True
    with pytest.raises(Unavailable):
        lab.hashes.lineage(version)
