"""An engine process for benchmarks.gateway.http.rates: measures cases in process, then serves the engine over gRPC.

Like a pod, without Redis, an object store and a trainer. Prints one JSON line a case, then one with the port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.cases import Case
from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for
from benchmarks.serving.rates import measure
from services.common.telemetry.tracing import open_tracer
from services.engine.observability.events import EventStream
from services.engine.observability.request_traces import RequestTraces
from services.engine.server.health import HealthReporter, ProcessHealth, Vitals
from services.engine.server.listen import bind
from services.engine.server.service import make_server
from services.engine.server.serving import Serving
from services.pod.preflight import use_kernel_cache


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def serve(engine: InProcessEngine) -> None:
    """Serves until the process is ended."""
    loop = engine.engine.loop
    state = ProcessHealth()
    state.serving(Vitals.of(loop))
    health = HealthReporter(state)
    built = engine.engine
    serving = Serving(
        loop,
        built.adapters,
        built.bind,
        built.read_drafter,
        built.constraints,
        built.codec,
        built.description,
        4096,
        lambda: "",
    )
    server = make_server(serving, health.servicer, 64 * 2**20)
    port = bind(server, "127.0.0.1", 0)
    await health.publish()
    await server.start()
    _print({"port": port, "model": built.description.name, "vocab_size": built.description.vocab_size})
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    settings = settings_for(options.model, options.device, quantization=options.quant, kv_cache_dtype=options.kv)
    only_warnings()
    use_kernel_cache(settings)
    tracer = open_tracer(settings, "engine")
    engine = InProcessEngine(settings, events=EventStream(RequestTraces(tracer).listen) if tracer.on else None)
    try:
        for case in filter(None, options.cases.split(",")):
            _print(measure(engine, Case.parse(case)))
        asyncio.run(serve(engine))
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
