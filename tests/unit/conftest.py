from __future__ import annotations

import pytest

from services.common.text.tokenizer import TextCodec
from tests.tokenizer_support import qwen_like_tokenizer


@pytest.fixture(scope="session")
def tokenizer_files() -> dict[str, bytes]:
    return qwen_like_tokenizer()


@pytest.fixture(scope="session")
def codec(tokenizer_files: dict[str, bytes]) -> TextCodec:
    return TextCodec(tokenizer_files)
