"""The checks of `temper doctor`, in the order in which they are told."""

from __future__ import annotations

from cli.doctor import quick
from cli.doctor.check import Check
from cli.doctor.checks import card, disk, model, packages, ports, redis, s3, security, server, telemetry, text

CHECKS: tuple[Check, ...] = (
    *quick.PYTHON,
    Check("packages.pins", packages.pinned),
    *quick.SETTINGS,
    Check("torch", card.torch),
    Check("card", card.limits),
    Check("card.memory", card.memory),
    Check("card.kernel", card.kernel),
    Check("port", ports.gateway),
    Check("redis", redis.answers),
    Check("redis.persistence", redis.persistence, needs="redis"),
    Check("redis.eviction", redis.eviction, needs="redis"),
    Check("redis.memory", redis.room, needs="redis"),
    Check("redis.latency", redis.latency, needs="redis"),
    Check("s3", s3.answers),
    Check("s3.clock", s3.clock, needs="s3"),
    Check("s3.permissions", s3.permissions, needs="s3"),
    Check("s3.conditions", s3.conditions, needs="s3.permissions"),
    *quick.MODEL,
    Check("model.digest", model.digest),
    Check("model.tokenizer", text.tokenizer),
    Check("model.template", text.template),
    *quick.MACHINE,
    Check("disk.tier", disk.tier),
    Check("certificates", security.certificates),
    Check("certificates.authorities", security.authorities),
    Check("telemetry", telemetry.collector),
    Check("server", server.ready),
    Check("server.version", server.version),
    Check("server.request", server.request),
)
