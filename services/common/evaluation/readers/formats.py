"""Every published form that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.common.evaluation.readers.gsm8k import read_gsm8k
from services.common.evaluation.readers.humaneval import read_humaneval
from services.common.evaluation.readers.ifeval import read_ifeval
from services.common.evaluation.readers.mmlu import read_mmlu
from services.common.evaluation.readers.published import PublishedSuite

FORMATS: Mapping[str, Callable[[str], PublishedSuite]] = {
    "mmlu": read_mmlu,
    "gsm8k": read_gsm8k,
    "ifeval": read_ifeval,
    "humaneval": read_humaneval,
}
"""Name of a form: reader of a file's text, which raises InvalidRequest."""
