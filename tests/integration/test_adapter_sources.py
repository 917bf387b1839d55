"""Adapters that are loaded from prefixes of a real S3 server."""

from __future__ import annotations

import pytest

from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.errors import AdapterRejected, InvalidRequest, ModelNotFound
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.gateway.api.adapters.sources import read_source
from services.gateway.settings import GatewaySettings


def test_a_prefix_that_is_allowed_is_read_and_nothing_else(
    settings: CommonSettings, store: ObjectStore, registry: AdapterRegistry
) -> None:
    bucket = settings.s3_bucket
    for key in ("lora/sql", "lora/half", "secret/sql"):
        store.put(f"{key}/{CONFIG}", b"{}")
    for key in ("lora/sql", "secret/sql"):
        store.put(f"{key}/{WEIGHTS}", b"0123456789" * 103)
    values = {**settings.model_dump(), "s3_bucket": "of-temper", "adapters_s3": f"s3://{bucket}/lora"}
    gateway = GatewaySettings.model_validate(values)
    files = read_source(gateway, registry, f"s3://{bucket}/lora/sql/")
    assert (files[CONFIG], len(files[WEIGHTS])) == (b"{}", 1030)
    with pytest.raises(InvalidRequest, match="TEMPER_ADAPTERS_S3"):
        read_source(gateway, registry, f"s3://{bucket}/secret/sql")
    with pytest.raises(ModelNotFound, match=WEIGHTS):
        read_source(gateway, registry, f"s3://{bucket}/lora/half")
    small = GatewaySettings.model_validate({**values, "max_upload_bytes": 1024})
    with pytest.raises(AdapterRejected, match="over the limit of 1024"):
        read_source(small, registry, f"s3://{bucket}/lora/sql")
