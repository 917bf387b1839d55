"""An engine without a model: every request gets one token a step. What the gateway costs is measured with it.

`python -m benchmarks.gateway.steady_engine --step-ms 5` serves gRPC and prints its port. With --eager the first token
of a request comes at once, outside the steps, as if its prompt took no time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc import aio

from services.common.pb import engine_pb2 as pb
from services.common.pb import engine_pb2_grpc
from services.common.text.tokenizer import TextCodec

_TEXT = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the warm afternoon sun. "
_CONTEXT = 1 << 20


class SteadyEngine(engine_pb2_grpc.EngineServicer):
    """Answers Stream, GetModel, GetTokenizerFiles and GetStatus."""

    def __init__(self, model: Path, step_seconds: float, *, eager: bool = False) -> None:
        self._codec = TextCodec.from_directory(model)
        self._step = step_seconds
        self._eager = eager
        self._tokens = self._codec.encode(_TEXT)

    async def Stream(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.EngineFrame]:  # noqa: N802
        running: dict[str, tuple[int, int]] = {}
        frames: asyncio.Queue[pb.EngineFrame] = asyncio.Queue()
        arrived = asyncio.Event()
        await context.send_initial_metadata(())

        async def read() -> None:
            async for frame in request_iterator:
                if frame.WhichOneof("frame") == "abort":
                    running.pop(frame.abort.request_id, None)
                    continue
                name = frame.submit.request_id
                running[name] = (0, frame.submit.sampling.max_tokens)
                if self._eager:
                    frames.put_nowait(pb.EngineFrame(updates=[self._update(name, 0, running)]))
                arrived.set()

        tasks = [asyncio.create_task(read()), asyncio.create_task(self._run(running, arrived, frames))]
        try:
            while True:
                yield await frames.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _run(
        self, running: dict[str, tuple[int, int]], arrived: asyncio.Event, frames: asyncio.Queue[pb.EngineFrame]
    ) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for step in count(1):
            while not running:
                arrived.clear()
                await arrived.wait()
                due = loop.time()
            frames.put_nowait(pb.EngineFrame(updates=[self._update(name, step, running) for name in list(running)]))
            due += self._step
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _update(self, name: str, step: int, running: dict[str, tuple[int, int]]) -> pb.Update:
        """The next token of a request, which leaves ``running`` with its last one."""
        token = self._tokens[step % len(self._tokens)]
        update = pb.Update(request_id=name, token_ids=[token], sampling_logprobs=[-1.25])
        done, limit = running[name]
        if done + 1 >= limit:
            update.finish_reason = pb.FINISH_REASON_LENGTH
            del running[name]
        else:
            running[name] = (done + 1, limit)
        return update

    async def GetModel(self, request: Any, context: Any) -> pb.Model:  # noqa: N802
        return pb.Model(
            name="qwen3.5",
            digest="0" * 64,
            max_model_len=_CONTEXT,
            vocab_size=self._codec.vocab_size,
            eos_token_ids=self._codec.eos_ids,
            tokenizer_digest=self._codec.digest,
        )

    async def GetTokenizerFiles(self, request: Any, context: Any) -> AsyncIterator[pb.FileChunk]:  # noqa: N802
        for name, data in self._codec.files.items():
            yield pb.FileChunk(name=name, data=data)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.Update]:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "gateways use Stream")
        yield pb.Update()

    async def GetRollouts(self, request: Any, context: Any) -> pb.GetRolloutsResponse:  # noqa: N802
        return pb.GetRolloutsResponse(missing=request.completion_ids)

    async def GetStatus(self, request: Any, context: Any) -> pb.EngineStatus:  # noqa: N802
        return pb.EngineStatus()

    async def GetLogs(self, request: Any, context: Any) -> pb.GetLogsResponse:  # noqa: N802
        return pb.GetLogsResponse()

    async def GetRequests(self, request: Any, context: Any) -> pb.GetRequestsResponse:  # noqa: N802
        return pb.GetRequestsResponse()

    async def Pause(self, request: Any, context: Any) -> pb.PauseResponse:  # noqa: N802
        return await _without(context)

    async def Resume(self, request: Any, context: Any) -> pb.ResumeResponse:  # noqa: N802
        return await _without(context)

    async def Sleep(self, request: Any, context: Any) -> pb.SleepResponse:  # noqa: N802
        return await _without(context)

    async def Wake(self, request: Any, context: Any) -> pb.WakeResponse:  # noqa: N802
        return await _without(context)


async def _without(context: Any) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this engine only answers")
    raise AssertionError("abort raises")


async def _serve(options: argparse.Namespace) -> None:
    server = aio.server(options=[("grpc.max_send_message_length", -1)])
    engine_pb2_grpc.add_EngineServicer_to_server(
        SteadyEngine(options.model, options.step_ms / 1e3, eager=options.eager), server
    )
    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="directory with tokenizer files")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
