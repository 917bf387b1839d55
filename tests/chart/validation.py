"""Objects against the schemas of Kubernetes, strictly: unknown fields are errors, as for `kubectl --validate`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
from kubernetes_validate import utils

VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
_CUSTOM = Path(__file__).parent / "schemas"


@functools.cache
def _builtin(kind: str, api_version: str, version: str) -> jsonschema_rs.Draft202012Validator:
    """What kubernetes_validate.validate makes anew for every object, and in Rust: an object's eight versions take a
    millisecond and not a tenth of a second.

    Raises:
        kubernetes_validate.SchemaNotFoundError: Kubernetes has no such kind.
    """
    group, _, name = api_version.rpartition("/")
    file = f"{kind.lower()}-{group.split('.')[0]}-{name}" if group else f"{kind.lower()}-{name}"
    directory = f"kubernetes-json-schema/v{_full(version)}-local-strict"
    try:
        schema = utils.schema_contents(f"{directory}/{file}.json", version)
    except FileNotFoundError:
        raise kubernetes_validate.SchemaNotFoundError(version=version, kind=kind, api_version=api_version) from None
    return jsonschema_rs.Draft202012Validator(schema, registry=_definitions(directory, version))


@functools.cache
def _definitions(directory: str, version: str) -> jsonschema_rs.Registry:
    definitions = utils.schema_contents(f"{directory}/_definitions.json", version)
    return jsonschema_rs.Registry([(definitions["$id"], definitions)])


@functools.cache
def _full(version: str) -> str:
    return str([one for one in utils.all_versions() if utils.major_minor(one) == version][-1])


@functools.cache
def _custom(kind: str, api_version: str) -> jsonschema_rs.Draft7Validator:
    schema = json.loads((_CUSTOM / f"{kind.lower()}.json").read_text())
    if schema["x-api-version"] != api_version:
        raise LookupError(f"{kind} of {api_version}: the schema here is of {schema['x-api-version']}")
    return jsonschema_rs.Draft7Validator(schema)


@functools.cache
def _problems(text: str, version: str) -> tuple[str, ...]:
    obj = json.loads(text)
    kind, api_version = obj["kind"], obj["apiVersion"]
    try:
        validator: Any = _builtin(kind, api_version, version)
    except kubernetes_validate.SchemaNotFoundError:
        validator = _custom(kind, api_version)
    return tuple(
        f"{kind} at {'.'.join(map(str, error.instance_path))}: {error.message[:300]}"
        for error in validator.iter_errors(obj)
    )


def problems(obj: Mapping[str, Any], version: str) -> Iterator[str]:
    """What a Kubernetes of this version would not take. Equal objects are looked at once."""
    yield from _problems(json.dumps(obj, sort_keys=True), version)
