"""Object keys of an adapter's parts in the bucket; services/common/adapters/registry.py has the whole layout."""

from __future__ import annotations

import urllib.parse

from services.common.adapters.names import AdapterVersion

ATTACHED = "attached/"


def versions_prefix(name: str) -> str:
    return f"adapters/{name}/versions/"


def version_prefix(version: AdapterVersion) -> str:
    return f"{versions_prefix(version.name)}{version.version:08d}/"


def manifest_key(version: AdapterVersion) -> str:
    return f"{version_prefix(version)}manifest.json"


def removed_key(version: AdapterVersion) -> str:
    """All that stays of a version that was removed, so that its number is never used again."""
    return f"{version_prefix(version)}removed"


def removing_prefix(version: AdapterVersion) -> str:
    """Somebody is about to remove the version: no pointer may move to it."""
    return f"{version_prefix(version)}removing-"


def receipt_key(version: AdapterVersion) -> str:
    """What the version was made of (services/common/adapters/receipts.py)."""
    return f"{version_prefix(version)}receipt.json"


def canary_key(version: AdapterVersion, canary_id: str) -> str:
    """Record of a canary that made the version current."""
    return f"{version_prefix(version)}canaries/{canary_id}.json"


def current_key(name: str) -> str:
    return f"adapters/{name}/CURRENT"


def job_key(name: str, job_id: str) -> str:
    return f"adapters/{name}/jobs/{job_id}"


def attachment_key(served_model_name: str) -> str:
    return ATTACHED + urllib.parse.quote(served_model_name, safe="")
