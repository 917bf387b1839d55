"""The model that all engines of a gateway serve: the first one that is reached says which it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.common.errors import CheckpointRejected
from services.common.pb import engine_pb2
from services.common.text.tokenizer import TextCodec
from services.gateway.engines.client import EngineClient
from services.gateway.text.detokenizer import Vocabulary

_TOKENIZER_SECONDS = 60.0


class ServedModel:
    """The model behind the engines and its tokenizer: the same for all of them.

    Args:
        info: what the engine says about it.
        codec: built from the engine's tokenizer files.
    """

    def __init__(self, info: engine_pb2.Model, codec: TextCodec) -> None:
        self.info = info
        self.codec = codec
        self.vocabulary = Vocabulary(codec)


class ModelAgreement:
    """Agreement of the engines on one model: whoever serves another checkpoint gets no requests.

    Args:
        clients: all engines as of now.
    """

    def __init__(self, clients: Callable[[], Sequence[EngineClient]]) -> None:
        self._clients = clients
        # Of engines that connect at the same time, one fetches the tokenizer and the others are held against it.
        self._lock = asyncio.Lock()
        self.served: ServedModel | None = None
        """None: no engine has been reached yet."""

    async def accept(self, client: EngineClient, info: engine_pb2.Model) -> None:
        """Checks that an engine serves the same model as the others; fetches the tokenizer if it is new.

        Raises:
            CheckpointRejected: it serves another checkpoint, or its tokenizer files are not those that it announced.
        """
        async with self._lock:
            others = [c for c in self._clients() if c is not client and c.model is not None]
            different = next((c for c in others if c.model is not None and c.model.digest != info.digest), None)
            if different is not None:
                raise CheckpointRejected(
                    f"engine {client.address} serves {info.name} ({info.digest[:12]}) but {different.address} another "
                    "checkpoint: all engines of a gateway must serve the same"
                )
            if self.served is None or self.served.info.tokenizer_digest != info.tokenizer_digest:
                codec = await asyncio.to_thread(TextCodec, await _tokenizer_files(client))
                if codec.digest != info.tokenizer_digest:
                    raise CheckpointRejected(
                        f"engine {client.address}: the tokenizer files have digest {codec.digest[:12]}, announced was "
                        f"{info.tokenizer_digest[:12]}"
                    )
                self.served = ServedModel(info, codec)
            elif self.served.info != info:
                self.served = ServedModel(info, self.served.codec)
            client.model = info


async def _tokenizer_files(client: EngineClient) -> dict[str, bytes]:
    chunks: dict[str, list[bytes]] = {}
    request = engine_pb2.GetTokenizerFilesRequest()
    async for chunk in client.engine_stub().GetTokenizerFiles(request, timeout=_TOKENIZER_SECONDS):
        chunks.setdefault(chunk.name, []).append(chunk.data)
    return {name: b"".join(parts) for name, parts in chunks.items()}
