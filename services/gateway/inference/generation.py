"""Runs the choices of one HTTP request on the engines."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from starlette.requests import Request

from services.common.adapters.names import BASE
from services.common.errors import InvalidRequest, ModelNotFound, Overloaded, RateLimited, TemperError
from services.common.pb import engine_pb2
from services.common.telemetry import tracing
from services.common.text.output_parser import END_THINK, ChatParser
from services.common.text.stops import Stops
from services.common.text.tool_calls.parser import OPEN
from services.gateway.auth.caller import owner, seconds_left
from services.gateway.core.admission import Reservation
from services.gateway.core.metrics import GenAiRequest
from services.gateway.engines.load_balancing import Affinity
from services.gateway.engines.served_model import ServedModel
from services.gateway.inference.canaries import KnownAs
from services.gateway.inference.choice import Choice, Step
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.engine_request import (
    cache_salt,
    check_messages,
    check_prompts,
    field_of_policy,
    policy_ref,
    session_of,
    version_ref,
)
from services.gateway.inference.logprobs import PromptLogprobs, check_complete
from services.gateway.protocol.fields.sampling import SamplingFields
from services.gateway.text.detokenizer import TextAssembler
from services.learning.canaries.answers import AnswerInCanary, Counts, failed_answer
from services.learning.canaries.enrolment import answer_digits
from services.learning.request_log.recording import RecordedChoice, Recording

_NOT_OF_A_VERSION = (InvalidRequest, Overloaded, RateLimited)
"""Errors that say nothing of the version that was to answer."""
_SMALLEST_TOP_P = 1e-6  # less may become 0 in the protocol's 32 bits


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt with limits and constraints of what follows it."""

    prompt: list[int]
    max_tokens: int
    """0: nothing, only the prompt is wanted."""
    tools: tuple[dict[str, object], ...] = ()
    thinking: bool = False
    """The completion begins inside the reasoning."""
    resumed: bool = False
    """The completion goes on with the last message of a conversation."""
    limits: engine_pb2.Thinking | None = None
    """Limits of the reasoning: where it ends and when it is closed."""
    constraint: engine_pb2.Constraint | None = None
    """Constraint on the completion, or on what follows its reasoning."""
    boundaries: Sequence[int] = ()
    """Places in the prompt where a message ends and another may follow."""


class Generation:
    """All choices of one HTTP request.

    Args:
        context: settings, engines, metrics.
        served: the model.
        body: the request.
        specs: its prompts, ``body.choices`` choices each.
        prefix: of the response id, "chatcmpl" or "cmpl".
        top_logprobs: alternatives a token; None: no log-probabilities.
        chat: parse reasoning and tool calls.
        prompt_logprobs: alternatives to each token of the prompts; None: no log-probabilities of them.
        parallel_tool_calls: a chat answer may have more than one call.
        shows_end: the token that ended a completion has log-probabilities like the others.
        session: the client's session that body or header name.
        traceparent: W3C trace context, checked.
        known_as: the id that clients know the answer by, where it is another than the generation's.

    Raises:
        InvalidRequest: a sampling field does not fit the model.
        ModelNotFound: `model` cannot be served.
    """

    def __init__(
        self,
        context: InferenceContext,
        served: ServedModel,
        body: SamplingFields,
        specs: Sequence[PromptSpec],
        *,
        prefix: str,
        top_logprobs: int | None,
        chat: bool,
        parallel_tool_calls: bool = True,
        prompt_logprobs: int | None = None,
        shows_end: bool = False,
        session: str | None = None,
        traceparent: str = "",
        known_as: KnownAs | None = None,
    ) -> None:
        self.enrolment = context.enrol(body, session) if known_as is None else known_as.enrolment
        """Part in a canary; None: it has none."""
        self.id = f"{prefix}-{answer_digits(self.enrolment)}"
        structlog.contextvars.bind_contextvars(completion_id=self.id)  # engines know the request by it
        self.created = int(time.time())
        self.model = body.model
        self.served = served
        numbered = bool(body.return_tokens_as_token_ids)
        self.names = served.vocabulary.numbered if numbered else served.vocabulary
        """Names of tokens in log-probabilities."""
        self.specs = specs
        self._affinity = Affinity(session, body.prompt_cache_key or body.user or None, owner())
        self._context = context
        self._started = time.monotonic()
        self._latencies = context.metrics.latencies(context.settings.served_model_name, stream=bool(body.stream))
        self._choices_per_prompt = body.choices
        self._adapter_field = field_of_policy(body)
        _check_tokens(body, served.info.vocab_size)
        check_prompts([len(spec.prompt) for spec in specs], context.settings)
        adapter = policy_ref(body, served_model_name=context.settings.served_model_name)
        if self.enrolment is not None and self.enrolment.arm == "candidate":
            adapter = version_ref(self.enrolment.version)
        total = len(specs) * body.choices
        operation = "chat" if chat else "text_completion"
        self._genai = GenAiRequest(context.metrics.genai, operation, context.settings.served_model_name)
        self._span = context.tracer.start(f"{operation} {body.model}", parent=traceparent, kind="client")
        traceparent = self._span.traceparent or traceparent
        self._traceparent = traceparent
        if self._span.recorded:
            self._span.set(_attributes(body, operation, self.id, total))
        salt = cache_salt(context.settings.cache_scope, body.cache_salt)
        deadline = int((time.time() + seconds_left(context.settings.request_timeout_seconds)) * 1000)
        own_ends = frozenset((*served.info.eos_token_ids, *served.codec.eos_ids))
        # Of a chat's text the engine does not know what a client sees, so it ends at control tokens only.
        engine_ends = [token for token in body.stop_token_ids or () if not (chat and served.vocabulary.is_text(token))]
        text_ends = frozenset(body.stop_token_ids or ()) - frozenset(engine_ends)
        cut_ids = frozenset(engine_ends) - own_ends
        end_think, call = (served.vocabulary.markup.get(tag) for tag in (END_THINK, OPEN))
        kept_as = None if self._affinity.history is None else session_of(self._affinity.history)
        self._reasons: list[str] = []
        """Finish reasons of the choices that have ended."""
        self.choices: list[Choice] = []
        self._requests: list[engine_pb2.GenerateRequest] = []
        for index in range(total):
            spec = specs[index // body.choices]
            completion_id = self.id if total == 1 else f"{self.id}:{index}"
            parser, stops = None, None
            if chat:
                if body.stop_strings or text_ends:
                    stops = Stops(body.stop_strings, token_ids=text_ends, min_tokens=body.min_tokens or 0)
                parser = ChatParser(
                    thinking=spec.thinking,
                    resumed=spec.resumed,
                    told=end_think is not None,
                    told_calls=call is not None,
                    tools=spec.tools,
                    parallel=parallel_tool_calls,
                    stops=stops,
                )
            texts = () if chat else body.stop_strings
            assembler = TextAssembler(served.vocabulary, stop=texts, min_tokens=body.min_tokens or 0)
            self.choices.append(
                Choice(
                    index,
                    completion_id,
                    len(spec.prompt),
                    assembler,
                    parser,
                    own_ends | cut_ids,
                    stops=stops,
                    cut_ids=cut_ids,
                    end_think_id=end_think,
                    call_id=call,
                    silent=spec.max_tokens == 0,
                    shows_end=shows_end or numbered,
                )
            )
            self._requests.append(
                engine_pb2.GenerateRequest(
                    request_id=completion_id,
                    prompt_token_ids=spec.prompt,
                    sampling=_sampling(body, spec, index % body.choices, top_logprobs, engine_ends),
                    adapter=adapter,
                    deadline_unix_ms=deadline,
                    traceparent=traceparent,
                    cache_salt=salt,
                    priority=body.priority or 0,
                    keep_rollout=spec.max_tokens > 0,
                    owner=owner(),
                    # Once a prompt: what its first choice is told counts for the others. A stream cannot wait for it.
                    prompt_logprobs=prompt_logprobs if body.stream or index % body.choices == 0 else None,
                    boundaries=spec.boundaries,
                    session=kept_as,
                )
            )
        self._recording = self._record(body, session, known_as)
        openings = () if self.enrolment is None else self.enrolment.route.refusals
        self._watched = [AnswerInCanary(openings) for _ in self.choices] if self.enrolment is not None else []

    @property
    def choices_per_prompt(self) -> int:
        return self._choices_per_prompt

    def prompt_scores(self, choice: Choice) -> PromptLogprobs:
        """Scores of a choice's prompt, once all is said of it; of a stream's, once the choice has begun."""
        if choice.prompt_scores.logprobs:
            return choice.prompt_scores
        return self.choices[choice.index - choice.index % self._choices_per_prompt].prompt_scores

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Steps that the engines answer, as they come; closing the generator aborts what still runs.

        Raises:
            TemperError: what an engine answered instead of tokens, or that it is gone.
        """
        ended: dict[int, Step] = {}
        """Last steps, which are told when the engine has their rollouts as they are."""
        try:
            prompts = [spec.prompt for spec in self.specs]
            async with self._context.engines.request_group(self._requests, self._affinity, prompts=prompts) as group:
                async for index, update in group:
                    choice = self.choices[index]
                    if choice.finished:
                        yield ended.pop(index)
                        continue
                    if choice.reads(update):
                        continue
                    step = choice.take(update, self._latencies)
                    if self._recording is not None:
                        kept = self._recording.add(
                            index, step.deltas, step.piece.text, step.token_ids, step.sampling_logprobs
                        )
                        kept.version, kept.finish_reason = choice.adapter, step.finish_reason
                    if self._watched:
                        self._watched[index].take(step.deltas, step.token_ids)
                    if step.first:
                        self._genai.begun(index)
                        choice.session = group.session(index)
                        if self._requests[index].HasField("prompt_logprobs"):
                            check_complete(choice.prompt_scores, choice.prompt_tokens - 1)
                    if step.finish_reason is not None:
                        self._finished(choice, step.finish_reason)
                        if update.finish_reason == engine_pb2.FINISH_REASON_UNSPECIFIED or choice.stopped:
                            ended[index] = step
                            group.finish(index, keep_tokens=choice.tokens)
                            continue
                    yield step
        except ModelNotFound as error:
            error.param = self._adapter_field  # the engine does not know where the name stood
            self._failed(error)
            raise
        except TemperError as error:
            self._failed(error, error.message)
            raise
        finally:
            self._span.end()
            if self._recording is not None:
                self._recording.end()

    def _record(self, body: SamplingFields, session: str | None, known_as: KnownAs | None) -> Recording | None:
        if self._context.recorder is None:
            return None
        choices = [RecordedChoice(choice.completion_id) for choice in self.choices]
        kind: Literal["chat", "text"] = "text" if self.choices[0].parser is None else "chat"
        prompts = [spec.prompt for spec in self.specs]
        recording = self._context.recorder.begin(self.id, kind, body, session, prompts, choices)
        if recording is not None and known_as is not None:
            recording.also.append(known_as.id)
        return recording

    def _failed(self, error: TemperError, message: str = "") -> None:
        self._genai.failed(error.code)
        self._span.fail(error.code, message)
        if not isinstance(error, _NOT_OF_A_VERSION):
            for _ in range(len(self.choices) - len(self._reasons)):
                self._counted("error", failed_answer())

    def _counted(self, outcome: str, counts: Counts) -> None:
        """Counts an answer in the canary that it has part in."""
        if self.enrolment is not None and self._context.canaries is not None:
            self._context.canaries.count(self.enrolment, outcome, counts)

    def _finished(self, choice: Choice, reason: str) -> None:
        metrics = self._context.metrics
        self._genai.finished(choice.index, choice.tokens)
        self._latencies.e2e.observe(time.monotonic() - self._started, tracing.exemplar(self._traceparent))
        metrics.finished.labels(reason).inc()
        # Pointers may have moved in the same moment: what another version answers tells nothing of the arm's.
        if self.enrolment is not None and (choice.adapter or BASE) == self.enrolment.version:
            self._counted(reason, self._watched[choice.index].ended(reason))
        self._reasons.append(reason)
        if len(self._reasons) == len(self.choices):
            self._ended(choice.adapter or self.model)
        self._context.count_tokens("completion", choice.tokens)
        if choice.index % self._choices_per_prompt == 0:
            self._context.count_tokens("prompt", choice.prompt_tokens)
            self._context.count_tokens("cached", choice.cached_tokens)

    def _ended(self, model: str) -> None:
        """All choices are finished."""
        input_tokens = sum(len(spec.prompt) for spec in self.specs)
        output_tokens = sum(one.tokens for one in self.choices)
        self._genai.ended(input_tokens=input_tokens, output_tokens=output_tokens)
        if self._span.recorded:
            cached = sum(one.cached_tokens for one in self.choices[:: self._choices_per_prompt])
            self._span.set(
                {
                    "gen_ai.request.max_tokens": max(spec.max_tokens for spec in self.specs),
                    "gen_ai.response.model": model,
                    "gen_ai.response.finish_reasons": self._reasons,
                    "gen_ai.usage.input_tokens": input_tokens,
                    "gen_ai.usage.output_tokens": output_tokens,
                    "gen_ai.usage.cache_read.input_tokens": cached,
                }
            )


def _attributes(body: SamplingFields, operation: str, response_id: str, choices: int) -> dict[str, tracing.Value]:
    """Attributes of a span of inference, by the names of OpenTelemetry's conventions for generative AI, 0.66b:
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/."""
    asked: dict[str, tracing.Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "temper",
        "gen_ai.request.model": body.model,
        "gen_ai.request.choice.count": choices if choices > 1 else None,
        "gen_ai.request.stream": True if body.stream else None,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.frequency_penalty": body.frequency_penalty,
        "gen_ai.request.presence_penalty": body.presence_penalty,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stop_sequences": list(body.stop_strings) or None,
        "gen_ai.response.id": response_id,
    }
    return {name: value for name, value in asked.items() if value is not None}


def traceparent_of(request: Request) -> str:
    """The context of an HTTP request: of its span, or without one what the client sent. Empty if that is malformed."""
    return tracing.current() or tracing.checked(request.headers.get("traceparent", ""))


def reserve(context: InferenceContext, body: SamplingFields, prompts: int) -> Reservation:
    """Takes a place for every choice, before anything is tokenized.

    Raises:
        InvalidRequest: more choices than one request may have.
        Overloaded: no room now.
    """
    check_messages(body, context.settings)
    limit = context.settings.max_choices
    if body.choices * prompts > limit:
        raise InvalidRequest(
            f"n={body.choices} for {prompts} prompt(s) is {body.choices * prompts} choices and a request may have "
            f"{limit}: send several requests",
            param="n",
        )
    return context.admission.reserve(body.choices * prompts)


def _check_tokens(body: SamplingFields, vocab_size: int) -> None:
    for field, tokens in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        for token in tokens or ():
            if token >= vocab_size:
                raise InvalidRequest(
                    f"{field} names the token id {token}, the vocabulary has {vocab_size} tokens", param=field
                )


def _check_length(body: SamplingFields, constraint: engine_pb2.Constraint) -> None:
    """A constraint says itself where the answer ends."""
    for field, given in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if given:
            raise InvalidRequest(
                f"{field} cannot be combined with {constraint.param}, which says where the answer ends", param=field
            )


def _sampling(
    body: SamplingFields, spec: PromptSpec, number: int, top_logprobs: int | None, stop_token_ids: Sequence[int]
) -> engine_pb2.SamplingParams:
    max_tokens = spec.max_tokens
    if spec.constraint is not None:
        _check_length(body, spec.constraint)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}, but the completion may have at most {max_tokens} tokens",
            param="min_tokens",
        )
    return engine_pb2.SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, _SMALLEST_TOP_P),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=None if body.seed is None else (body.seed + number) % 2**64,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        max_tokens=max(1, max_tokens),  # an engine ends a request with a token; see Choice.silent
        top_logprobs=top_logprobs,
        constraint=spec.constraint,
        thinking=spec.limits,
    )
