"""Structured output: `python -m benchmarks.structured.run --schemas 500 --cost 16x128x128 --check`.

--schemas: so many generated JSON schemas, each answered once at temperature 1; every answer must be valid, or its
schema refused before. --cost: decode rates of the same batch with and without a JSON schema, in turn: what a mask a
token costs. --check: sampling under masks on the GPU beside the reference on the CPU. One JSON line each.

On a GPU: `--model qwen3.5-4b`, random weights of that shape with a tokenizer as wide as their logits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.cases import Case
from benchmarks.lib.checkpoints.wide_tokenizer import widen
from benchmarks.lib.environment import environment, gpu
from benchmarks.lib.random_checkpoint import SHAPES, config_of, write
from benchmarks.lib.recorder import put_line
from benchmarks.structured.schemas import SchemaMaker
from cli.http.load.figures import percentile

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine
    from services.engine.requests.outputs import SequenceUpdate
    from services.engine.requests.submission import Submission

_ENDLESS = {"type": "array", "items": {"type": "string"}, "minItems": 100_000}
"""Keeps a request going: its end is that of its tokens."""


def run_all(
    engine: InProcessEngine, submissions: Sequence[Submission]
) -> tuple[dict[str, list[SequenceUpdate]], float]:
    """The updates of each request, and the seconds until all had ended."""
    from benchmarks.lib.in_process import submit_together

    updates: dict[str, list[SequenceUpdate]] = {submission.request_id: [] for submission in submissions}
    left, done = len(submissions), threading.Event()

    def sink(part: list[SequenceUpdate]) -> None:
        nonlocal left
        for update in part:
            updates[update.request_id].append(update)
            left -= update.finish_reason is not None
        if left == 0:
            done.set()

    began = time.perf_counter()
    submit_together(engine.engine.loop, submissions, sink)
    done.wait()
    return updates, time.perf_counter() - began


def try_schemas(engine: InProcessEngine, count: int, seed: int, max_tokens: int) -> dict[str, Any]:
    """Answers to generated schemas, by what became of them."""
    import jsonschema_rs

    from services.engine.constraints.refusal import Refused
    from services.engine.requests.adapter import AdapterChoice
    from services.engine.requests.request import FinishReason
    from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams
    from services.engine.requests.submission import Submission

    maker = SchemaMaker(seed)
    compile_one = compiler_of(engine)
    schemas: dict[str, Any] = {}
    refusals: Counter[str] = Counter()
    seconds: list[float] = []
    submissions: list[Submission] = []
    for number in range(count):
        schema = maker.schema()
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),), "response_format")
        began = time.perf_counter()
        try:
            grammar = compile_one(constraint)
        except Refused as error:
            refusals[str(error)] += 1
            continue
        seconds.append(time.perf_counter() - began)
        name = f"schema-{number}"
        schemas[name] = schema
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=max_tokens, constraint=constraint)
        prompt = engine.prompts(1, 8)[0]
        submissions.append(Submission(name, prompt, sampling, AdapterChoice(), matcher=grammar.matcher(sampling)))
    updates, elapsed = run_all(engine, submissions)
    codec = engine.engine.codec
    invalid: list[dict[str, Any]] = []
    tokens = unfinished = 0
    for name, parts in updates.items():
        output = [part.token.token_id for part in parts if part.token is not None]
        tokens += len(output)
        reason = parts[-1].finish_reason
        if reason is not FinishReason.STOP:
            unfinished += 1
            invalid.append({"schema": schemas[name], "ended": str(reason), "error": str(parts[-1].error)})
            continue
        text = b"".join(codec.token_bytes(token) for token in output if token not in codec.eos_ids).decode()
        try:
            jsonschema_rs.validator_for(schemas[name], validate_formats=True).validate(json.loads(text))
        except ValueError as error:
            invalid.append({"schema": schemas[name], "text": text, "error": str(error)[:300]})
    return {
        "schemas": count,
        "valid": len(updates) - len(invalid),
        "invalid": len(invalid),
        "unfinished": unfinished,
        "refused": sum(refusals.values()),
        "refusals": dict(refusals.most_common()),
        "tokens": tokens,
        "seconds": round(elapsed, 2),
        "compile_ms": {
            "p50": round(1e3 * percentile(seconds, 0.5), 2),
            "p99": round(1e3 * percentile(seconds, 0.99), 2),
            "max": round(1e3 * max(seconds), 2),
        },
        "examples": invalid[:5],
    }


def compiler_of(engine: InProcessEngine) -> Any:
    """Compiles for the vocabulary of an engine, at once."""
    from services.engine.constraints.grammars import GrammarLimits, compile_grammar

    vocabulary = engine.engine.constraints.vocabulary
    return lambda constraint: compile_grammar(vocabulary, constraint, GrammarLimits())


def measure_cost(engine: InProcessEngine, case: Case, repeats: int) -> dict[str, Any]:
    """Decode rates with and without masks, in turn: decode = c · (out - 1) / (t(out) - t(1)), the best of each."""
    from services.engine.requests.adapter import AdapterChoice
    from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams
    from services.engine.requests.submission import Submission

    constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(_ENDLESS),))
    grammar = compiler_of(engine)(constraint)
    runs = 0

    def seconds(new_tokens: int, *, masked: bool) -> float:
        nonlocal runs
        runs += 1
        sampling = (
            SamplingParams(temperature=1.0, max_tokens=new_tokens, constraint=constraint)
            if masked
            else SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True)
        )
        updates, elapsed = run_all(
            engine,
            [
                Submission(
                    f"cost-{runs}-{index}",
                    prompt,
                    sampling,
                    AdapterChoice(),
                    matcher=grammar.matcher(sampling) if masked else None,
                )
                for index, prompt in enumerate(engine.prompts(case.requests, case.prompt_tokens))
            ],
        )
        made = sum(part.token is not None for parts in updates.values() for part in parts)
        if made != case.requests * new_tokens:
            raise RuntimeError(f"{made} tokens came of {case.requests} requests for {new_tokens}")
        return elapsed

    rates: dict[bool, list[float]] = {False: [], True: []}
    stats: list[float] = []
    with mask_times(engine, stats):
        for masked in (False, True):
            seconds(min(case.new_tokens, 12), masked=masked)
        stats.clear()
        for _ in range(repeats):
            for masked in (False, True):
                one = seconds(1, masked=masked)
                whole = seconds(case.new_tokens, masked=masked)
                rates[masked].append(case.requests * (case.new_tokens - 1) / (whole - one))
    plain, constrained = max(rates[False]), max(rates[True])
    return {
        "c": case.requests,
        "in": case.prompt_tokens,
        "out": case.new_tokens,
        "decode_tok_s": round(plain, 1),
        "decode_tok_s_constrained": round(constrained, 1),
        "cost": round(1 - constrained / plain, 4),
        "median_cost": round(1 - statistics.median(rates[True]) / statistics.median(rates[False]), 4),
        "mask_ms": {"p50": round(1e3 * percentile(stats, 0.5), 3), "p99": round(1e3 * percentile(stats, 0.99), 3)},
        "runs": {"plain": [round(r, 1) for r in rates[False]], "constrained": [round(r, 1) for r in rates[True]]},
        "gpu_after": gpu(),
    }


class mask_times:  # noqa: N801 - a context manager
    """Inside, the seconds that the masks of each step took are collected."""

    def __init__(self, engine: InProcessEngine, into: list[float]) -> None:
        self._pipeline, self._into = engine.pipeline, into
        self._before = self._pipeline._events

    def __enter__(self) -> None:
        from services.engine.observability.events import EngineEvent, EventStream, StepDone

        into = self._into

        def note(event: EngineEvent) -> None:
            if isinstance(event, StepDone) and event.mask_seconds:
                into.append(event.mask_seconds)

        self._pipeline._events = EventStream(note)

    def __exit__(self, *_: object) -> None:
        self._pipeline._events = self._before


def check_sampling(vocab: int, rows: int, seed: int) -> dict[str, Any]:
    """Masked rows of every kind on the GPU and by the reference: tokens that differ, and by how much what is said of
    them does. A race that is equal to the resolution of float32 may go either way, about once in 100,000 rows."""
    import numpy as np
    import torch

    from services.engine.constraints.masks import RowMasks
    from services.engine.constraints.vocabulary import allow, allows
    from services.engine.executors.cpu.sampler import Sampler
    from services.engine.executors.cuda.sampling.mask_upload import MaskUpload
    from services.engine.executors.cuda.sampling.sampler import CudaSampler
    from services.engine.executors.cuda.stream import EngineStream
    from services.engine.requests.request import Request
    from services.engine.requests.sampling_params import SamplingParams
    from services.engine.scheduler.step_plan import Chunk

    draw = random.Random(seed)
    device = torch.device("cuda")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_logprobs": 3},
        {"top_p": 0.9},
        {"top_k": 40},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
        {"min_p": 0.05},
        {"presence_penalty": 0.5, "logit_bias": {5: 2.0}},
    ]
    stream = EngineStream(device)
    sampler = CudaSampler([1], rows + 1, vocab, rows, device)
    upload = MaskUpload(stream, rows, vocab)
    wrong = excluded = 0
    largest = 0.0
    rounds = 20
    for number in range(rounds):
        requests = [
            Request(f"{number}-{row}", (1, 2), SamplingParams(seed=draw.randrange(2**32), **kinds[row % len(kinds)]))
            for row in range(rows)
        ]
        chunks = [Chunk(each, (2,), 1, [1], 1 + row, True, [], 0) for row, each in enumerate(requests)]
        masked = [row for row in range(rows) if row % 3]
        bits = np.zeros((len(masked), -(-vocab // 32)), dtype=np.int32)
        for allowed in bits:
            allow(allowed, draw.sample(range(vocab), draw.choice([1, 7, 1000, vocab // 2])))
        masks = RowMasks(masked, bits)
        logits = torch.randn(rows, vocab, device=device, generator=torch.Generator(device).manual_seed(number)) * 2
        with stream.active():
            words = sampler.launch(logits, sampler.prepare(chunks), masks=upload.send(masks)).words
            stream.mark().wait()
            ours = sampler.read(words.cpu())
        theirs = Sampler([1], torch.device("cpu")).sample(logits.cpu(), chunks, masks)
        for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            wrong += a.token_id != b.token_id
            if a.token_id == b.token_id:
                largest = max(largest, abs(a.sampling_logprob - b.sampling_logprob))
            if row in masked and not allows(bits[masked.index(row)], a.token_id):
                excluded += 1
    return {
        "vocab": vocab,
        "rows": rows * rounds,
        "tokens_that_differ": wrong,
        "tokens_that_masks_exclude": excluded,
        "largest_logprob_error": largest,
        "gpu_after": gpu(),
    }


def checkpoint(name: str, scratch: Path, layers: int | None) -> Path:
    """A directory, or a random checkpoint of a shape with a wide tokenizer."""
    if name not in SHAPES:
        return Path(name)
    directory = scratch / f"{name}-wide{'' if layers is None else f'-{layers}'}"
    if not (directory / "model.safetensors.index.json").exists():
        write(directory, config_of(name, layers))
        widen(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny", help=f"directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="of a shape: fewer layers than it has")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"), help="for random checkpoints")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--schemas", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=1500, help="of an answer to a schema")
    parser.add_argument("--cost", type=Case.parse, metavar="CxINxOUT")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="needs a GPU")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any engine setting")
    parser.add_argument("--out", type=Path, help="file that results are appended to")
    options = parser.parse_args()
    if not (options.schemas or options.cost or options.check):
        parser.error("nothing to do: give --schemas, --cost or --check")
    common: dict[str, Any] = {"model": options.model, "settings": options.set, **environment()}
    if options.schemas or options.cost:
        with_engine(options, common)
    if options.check:
        put_line({"benchmark": "masked sampling", **common, **check_sampling(248_320, 64, options.seed)}, options.out)


def with_engine(options: argparse.Namespace, common: dict[str, Any]) -> None:
    """Measurements that need a model."""
    from services.pod.preflight import use_kernel_cache

    directory = checkpoint(options.model, options.scratch, options.layers)
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for

    cpu = {"max_num_seqs": 16, "max_model_len": 2048} if options.device == "cpu" else {}
    settings = settings_for(directory, options.device, **cpu, **dict(pair.split("=", 1) for pair in options.set))
    only_warnings()
    use_kernel_cache(settings)
    engine = InProcessEngine(settings)
    try:
        if options.schemas:
            report = try_schemas(engine, options.schemas, options.seed, options.max_tokens)
            put_line({"benchmark": "schemas", **common, **report}, options.out)
        if options.cost:
            report = measure_cost(engine, options.cost, options.repeats)
            put_line({"benchmark": "cost of masks", **common, **report}, options.out)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
