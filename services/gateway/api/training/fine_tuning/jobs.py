"""Training jobs of fine-tuning requests: the specification, and errors in the words of the request."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from services.common.adapters.names import BASE
from services.common.errors import InvalidRequest, NotFound, PayloadTooLarge, TemperError
from services.common.jobs import DpoJob, GrpoJob, SftJob, TrainingSpec
from services.common.jobs.fine_tuning import FineTuning
from services.common.storage.ids import ulid
from services.common.validation.errors import problem
from services.gateway.api.training.fine_tuning import data
from services.gateway.api.training.fine_tuning.graders import Grading, grading
from services.gateway.api.training.submission import checked
from services.gateway.api.training.validation import TrainingServices
from services.gateway.core.file_store import FileInfo
from services.gateway.protocol.training.fine_tuning import (
    AUTO,
    DpoHyperparameters,
    FineTuningRequest,
    Hyperparameters,
    MethodName,
    ReinforcementHyperparameters,
    ReinforcementMethod,
)

Row = TypeVar("Row")
_KINDS: Mapping[MethodName, type[SftJob | DpoJob | GrpoJob]] = {
    "supervised": SftJob,
    "dpo": DpoJob,
    "reinforcement": GrpoJob,
}
_BATCH = 8
"""Lines of a step, and completions of a prompt, where the request leaves them open."""
_EPOCH_VERSIONS = 2
"""Epochs before the last whose ends are checkpoints: with the result three, as at OpenAI."""
_MOST_TOKENS = 1024
"""Tokens of a completion that is graded, at most."""
_PLACE = re.compile(r"\b(?:generate\.)?(eval_)?(?:examples|prompts)\[(\d+)\]")
_FIELDS = {"start_from": "model", "learning_rate_multiplier": "method"}
"""Fields of requests that fields of jobs are made of."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Checked job, and its request as the record of the job keeps it."""

    spec: TrainingSpec
    request: FineTuning


async def prepared(training: TrainingServices, owner: str, body: FineTuningRequest) -> Prepared:
    """The job that a request asks for, with the data of its files.

    Raises:
        InvalidRequest: a line of a file cannot be learnt from, or something does not fit the model; names the field of
            the request, and the line.
        NotFound, ModelNotFound, AdapterRejected, Unavailable: as of other jobs.
    """
    infos = [
        await _file(training, owner, field, file_id)
        for field, file_id in (("training_file", body.training_file), ("validation_file", body.validation_file))
        if file_id is not None
    ]
    limit = training.settings.max_body_bytes
    if sum(info.bytes for info in infos) > limit:
        raise PayloadTooLarge(
            f"training_file: the files have more than {limit} bytes, which is the limit of a job "
            "(TEMPER_MAX_BODY_BYTES): split them",
            param="training_file",
        )
    lines = [
        data.Lines(field, training.files, owner, info)
        for field, info in zip(("training_file", "validation_file"), infos, strict=False)
    ]
    making = _Making(body, training.settings.served_model_name, training.engines.served.info.max_train_tokens, lines)
    prepared = await training.threads.run(making.job)
    try:
        return Prepared(await checked(training, prepared.spec), prepared.request)
    except TemperError as error:
        making.explain(error)
        raise


async def _file(training: TrainingServices, owner: str, field: str, file_id: str) -> FileInfo:
    try:
        info = await training.threads.run(training.files.get, owner, file_id)
    except NotFound as error:
        error.param = field
        raise
    if info.purpose != "fine-tune":
        raise InvalidRequest(
            f"{field}: {info.id} has the purpose {info.purpose!r}: upload the file with the purpose 'fine-tune'",
            param=field,
        )
    return info


class _Making:
    """A job in the making. Its files are read in a thread."""

    def __init__(self, body: FineTuningRequest, base: str, max_tokens: int, lines: list[data.Lines]) -> None:
        self._body = body
        self._base = base
        self._max_tokens = max_tokens
        self._lines = lines

    def job(self) -> Prepared:
        """Reads the files. Raises as `prepared` does."""
        body, method = self._body, self._body.chosen
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        suffix = "" if body.suffix is None else f"{body.suffix}-"
        common = {
            "adapter": f"ft-{suffix}{ulid()[-8:]}",
            "start_from": BASE if body.model == self._base else body.model,
            "attach": False,
            "seed": seed,
            "metadata": body.metadata or {},
        }
        model = _KINDS[method.type]
        if method.reinforcement is not None:
            fields, used = self._reinforcement(method.reinforcement)
        elif method.type == "dpo":
            fields, used = self._dpo((method.dpo and method.dpo.hyperparameters) or DpoHyperparameters())
        else:
            given = (method.supervised and method.supervised.hyperparameters) or Hyperparameters()
            fields, used = self._supervised(given)
        if isinstance(used["learning_rate_multiplier"], float) and used["learning_rate_multiplier"] != 1:
            common["learning_rate_multiplier"] = used["learning_rate_multiplier"]
        settings: dict[str, Any] = {"hyperparameters": used}
        if method.reinforcement is not None:
            settings["grader"] = method.reinforcement.grader.model_dump(mode="json")
        request = FineTuning(
            model=body.model,
            training_file=body.training_file,
            validation_file=body.validation_file,
            seed=seed,
            method={"type": method.type, method.type: settings},
        )
        try:
            return Prepared(model.model_validate({**common, **fields}), request)
        except ValidationError as error:
            refused = InvalidRequest(problem(error, model, {**common, **fields}), param="training_file")
            self.explain(refused)
            raise refused from error

    def explain(self, error: TemperError) -> None:
        """Has an error of a job name the lines of the files, and the fields of the request."""

        def line(found: re.Match[str]) -> str:
            lines = self._lines[1 if found.group(1) else 0]
            return f"line {lines.numbers[int(found.group(2))]} of {lines.field}"

        found = _PLACE.search(error.param or "") or _PLACE.search(error.message)
        if found is not None:
            error.param = "validation_file" if found.group(1) else "training_file"
        else:
            error.param = _FIELDS.get(error.param or "", error.param)
        error.message = _PLACE.sub(line, error.message)

    def _supervised(self, given: Hyperparameters) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, used = self._examples(given, data.supervised)
        raw = [line.prompt is not None for rows in (fields["examples"], fields["eval_examples"]) for line in rows]
        if any(raw):
            if not all(raw):
                raise InvalidRequest(
                    "training_file: lines of prompt and completion and lines of messages cannot be mixed in one job",
                    param="training_file",
                )
            fields["prompt_format"] = "raw"
        return fields, used

    def _dpo(self, given: DpoHyperparameters) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, used = self._examples(given, data.preference)
        beta = _chosen(given.beta, 0.1)
        return {**fields, "beta": beta, "reference": "start"}, {**used, "beta": beta}

    def _examples(
        self, given: Hyperparameters, convert: Callable[[Mapping[str, Any]], Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        rows, held_out = self._rows(convert)
        size = _chosen(given.batch_size, _BATCH)
        fields: dict[str, Any] = {"examples": rows, "eval_examples": held_out, "batch_size": size}
        if isinstance(given.n_epochs, int):
            fields["epochs"] = given.n_epochs
        fields["epoch_versions"] = _EPOCH_VERSIONS
        return fields, _used(given.n_epochs or AUTO, size, given)

    def _reinforcement(self, method: ReinforcementMethod) -> tuple[dict[str, Any], dict[str, Any]]:
        given = method.hyperparameters or ReinforcementHyperparameters()
        graded: Grading = grading(method.grader)
        prompts, held_out = self._rows(partial(data.prompt, answer=graded.answer))
        size = min(_chosen(given.batch_size, _BATCH), len(prompts))
        epochs = _chosen(given.n_epochs, 1)
        multiplier = _chosen(given.compute_multiplier, 1.0)
        interval = None if given.eval_interval in (None, AUTO) else given.eval_interval
        if interval is not None and not held_out:
            raise InvalidRequest(
                "eval_interval would do nothing here: there is no validation_file to evaluate on",
                param="method.reinforcement.hyperparameters.eval_interval",
            )
        generate: dict[str, Any] = {
            "prompts": prompts,
            "eval_prompts": held_out,
            "prompts_per_round": size,
            "rounds": math.ceil(len(prompts) / size) * epochs,
            "completions": max(2, round(_BATCH * multiplier)),
            "max_tokens": min(_MOST_TOKENS, max(1, self._max_tokens // 2)) if self._max_tokens else _MOST_TOKENS,
            "reward": list(graded.rewards),
        }
        if interval is not None:
            generate["eval_every"] = interval
        used = _used(epochs, size, given)
        return {"generate": generate}, {
            **used,
            "compute_multiplier": multiplier,
            "eval_interval": interval or AUTO,
            "eval_samples": 1,
            "reasoning_effort": "default",
        }

    def _rows(self, convert: Callable[[Mapping[str, Any]], Row]) -> tuple[list[Row], list[Row]]:
        """Rows of the training file and of the validation file."""
        found = [lines.read(convert) for lines in self._lines]
        return found[0], found[1] if len(found) > 1 else []


def _chosen(given: Any, usual: Any) -> Any:
    return usual if given is None or given == AUTO else given


def _used(epochs: int | str, size: int, given: Hyperparameters) -> dict[str, Any]:
    return {
        "n_epochs": epochs,
        "batch_size": size,
        "learning_rate_multiplier": float(_chosen(given.learning_rate_multiplier, 1.0)),
    }
