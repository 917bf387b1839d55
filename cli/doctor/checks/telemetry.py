"""The collector of traces."""

from __future__ import annotations

import grpc

from cli.doctor.findings import Finding, NotHere, ok, warning
from cli.doctor.place import Place
from services.common.security.outbound import authorities

_SECONDS = 3.0


def collector(place: Place) -> Finding:
    """The collector of traces accepts connections."""
    endpoint = place.engine.otlp_endpoint
    if not endpoint:
        raise NotHere("TEMPER_OTLP_ENDPOINT is not set: nothing is traced")
    scheme, _, address = endpoint.partition("://")
    if scheme == "https":
        try:
            trusted = authorities(place.engine)
        except OSError as error:
            raise NotHere("TEMPER_CA_BUNDLE cannot be read") from error
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted))
    else:
        channel = grpc.insecure_channel(address)
    with channel:
        try:
            grpc.channel_ready_future(channel).result(_SECONDS)
        except grpc.FutureTimeoutError:
            return warning(
                f"no collector speaks gRPC at {endpoint} (TEMPER_OTLP_ENDPOINT): traces are lost",
                "start it, correct the address (4317 is OTLP over gRPC, 4318 over HTTP), or unset the variable",
            )
    return ok(f"a collector answers at {endpoint}")
