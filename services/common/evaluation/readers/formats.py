"""Every published form that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from services.common.errors import InvalidRequest
from services.common.evaluation.readers.gsm8k import read_gsm8k
from services.common.evaluation.readers.ifeval import read_ifeval
from services.common.evaluation.readers.mmlu import read_mmlu
from services.common.evaluation.readers.published import PublishedSuite


def refuse_humaneval(text: str) -> NoReturn:
    """Raises InvalidRequest."""
    del text
    raise InvalidRequest(
        "humaneval: its answers are programs that have to be run, and there is no sandbox to run them in yet: scored "
        "by anything else, the numbers would not be HumanEval's",
        param="format",
    )


FORMATS: Mapping[str, Callable[[str], PublishedSuite]] = {
    "mmlu": read_mmlu,
    "gsm8k": read_gsm8k,
    "ifeval": read_ifeval,
    "humaneval": refuse_humaneval,
}
"""Name of a form: reader of a file's text, which raises InvalidRequest."""
