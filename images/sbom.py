"""A software bill of materials in CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json/), from what is really installed.

Our own 100 lines and not cyclonedx-bom: that would be a dozen more packages, to be pinned and trusted while an image is
built, for what importlib.metadata and dpkg's status file say. The same inputs give the same bytes.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def python_components(site: Path) -> tuple[list[Component], dict[str, list[str]]]:
    """Components that are installed in a site-packages directory, and their dependencies (by bom-ref)."""
    found = {canonical(item.name): item for item in importlib.metadata.distributions(path=[str(site)])}
    components, needs = [], {}
    for name, item in sorted(found.items()):
        reference = f"pkg:pypi/{name}@{quote(item.version)}"
        component: Component = {
            "type": "library",
            "bom-ref": reference,
            "name": item.name,
            "version": item.version,
            "purl": reference,
        }
        if "Summary" in item.metadata:
            component["description"] = " ".join(item.metadata["Summary"].split())
        if licence := _licence(item.metadata):
            component["licenses"] = [licence]
        components.append(component)
        # What only an extra wants is not there because of it.
        plain = (_REQUIREMENT.match(line) for line in item.requires or [] if "extra ==" not in line)
        others = {canonical(match[0]) for match in plain if match} & found.keys()
        needs[reference] = sorted(f"pkg:pypi/{other}@{quote(found[other].version)}" for other in others)
    return components, needs


def debian_components(status: Path) -> list[Component]:
    """Components that dpkg has installed; empty for bases of another kind."""
    if not status.is_file():
        return []
    components = []
    for block in status.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if re.match(r"[A-Z][A-Za-z-]*: ", line))
        if fields.get("Status", "").endswith(" installed"):
            name, version, machine = fields["Package"], fields["Version"], fields.get("Architecture", "all")
            reference = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={machine}"
            components.append(
                {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}
            )
    return sorted(components, key=lambda component: str(component["bom-ref"]))


def document(
    name: str, version: str, components: Iterable[Component], needs: dict[str, list[str]], seconds: int
) -> dict[str, Any]:
    """The whole document.

    Args:
        seconds: when the image was made, since 1970 (SOURCE_DATE_EPOCH).
    """
    listed = list(components)
    root = f"pkg:oci/{name.rpartition('/')[2]}@{quote(version)}"
    known = json.dumps([root, listed], sort_keys=True).encode()
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=hashlib.sha256(known).digest()[:16], version=4)}",
        "version": 1,
        "metadata": {
            "timestamp": when.isoformat().replace("+00:00", "Z"),
            "component": {"type": "container", "bom-ref": root, "name": name, "version": version},
        },
        "components": listed,
        "dependencies": [
            {"ref": root, "dependsOn": [component["bom-ref"] for component in listed]},
            *({"ref": reference, "dependsOn": others} for reference, others in sorted(needs.items())),
        ],
    }


def write(path: Path, name: str, version: str, site: Path, status: Path, seconds: int) -> None:
    """Writes the document of one image."""
    libraries, needs = python_components(site)
    content = document(name, version, [*libraries, *debian_components(status)], needs, seconds)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _licence(metadata: Any) -> dict[str, Any] | None:
    if expression := metadata.get("License-Expression"):
        return {"expression": expression}
    text = metadata.get("License")
    if text and "\n" not in text.strip() and len(text) < 100:
        return {"license": {"name": text.strip()}}
    names = [
        line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")
    ]
    return {"license": {"name": ", ".join(names)}} if names else None
