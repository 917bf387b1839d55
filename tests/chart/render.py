"""The chart as the real Helm library renders it, and its objects as a test wants to look at them."""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "temper"
RELEASE, NAMESPACE = "demo", "ai"
REGISTRY = "registry.example.com"
OURS = {part: {"image": {"registry": REGISTRY}} for part in ("gateway", "engine")}
"""What every install has to say: where its images are."""

POD_IP = "10.0.0.7"
"""Address of every pod, as its containers are told."""

Object = Mapping[str, Any]


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Values over values, as Helm lays -f files over each other."""
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            below = result.get(key)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            result[key] = merged(below, value) if both else value
    return result


def values_file(name: str) -> dict[str, Any]:
    """values-NAME.yaml of the chart."""
    loaded: dict[str, Any] = yaml.safe_load((CHART / f"values-{name}.yaml").read_text())
    return loaded


@dataclass(frozen=True)
class Container:
    """One container of a workload, with what it reads from Secrets and ConfigMaps looked up.

    Args:
        pod: the pod's spec.
        spec: the container's.
        secrets: of the release, by name; what is not among them is somebody else's and stays unresolved.
    """

    pod: Object
    spec: Object
    secrets: Mapping[str, Mapping[str, str]]

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def command(self) -> list[str]:
        """Empty: the image's entry point."""
        return [str(word) for word in self.spec.get("command", ())]

    @property
    def args(self) -> list[str]:
        return [str(word) for word in self.spec.get("args", ())]

    @property
    def ports(self) -> dict[str, int]:
        """Name → number."""
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", ())}

    @cached_property
    def references(self) -> dict[str, tuple[str, str]]:
        """Variable → Secret and key, of those that have one."""
        found = {}
        for entry in self.spec.get("env", ()):
            if (reference := entry.get("valueFrom", {}).get("secretKeyRef")) is not None:
                found[entry["name"]] = (reference["name"], reference["key"])
        return found

    def env(self, outside: Mapping[tuple[str, str], str] | None = None) -> dict[str, str]:
        """The environment as the kubelet would make it.

        Args:
            outside: values of Secrets that are not the release's, by name and key.

        Raises:
            KeyError: a Secret or a key is nowhere.
        """
        result: dict[str, str] = {}
        for source in self.spec.get("envFrom", ()):
            names = [key for secret, key in (outside or {}) if secret == source.get("secretRef", {}).get("name")]
            result |= {name: (outside or {})[source["secretRef"]["name"], name] for name in names}
        for entry in self.spec.get("env", ()):
            name = entry["name"]
            if name in result:
                raise KeyError(f"{name} is there twice")
            if "fieldRef" in entry.get("valueFrom", {}):
                result[name] = {"status.podIP": POD_IP}[entry["valueFrom"]["fieldRef"]["fieldPath"]]
                continue
            if "value" in entry:
                if not isinstance(entry["value"], str):
                    raise TypeError(f"{name} is no text: {entry['value']!r}")
                result[name] = self.expanded(entry["value"], result)
                continue
            secret, key = self.references[name]
            given = (outside or {}).get((secret, key))
            result[name] = self.secrets[secret][key] if given is None else given
        return result

    @staticmethod
    def expanded(text: str, env: Mapping[str, str]) -> str:
        """$(NAME) of what is said before; what nobody says stays as it is."""
        return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: env.get(found[1], found[0]), text)

    @property
    def mounts(self) -> dict[str, tuple[Object, str]]:
        """Mount path → the volume's definition and the sub path; of claims that the workload makes, {"claimTemplate":
        name}."""
        volumes = {volume["name"]: volume for volume in self.pod.get("volumes", ())}
        return {
            mount["mountPath"]: (volumes.get(mount["name"], {"claimTemplate": mount["name"]}), mount.get("subPath", ""))
            for mount in self.spec.get("volumeMounts", ())
        }


@dataclass(frozen=True)
class Workload:
    """A Deployment, a StatefulSet, or a bare Pod."""

    manifest: Object
    secrets: Mapping[str, Mapping[str, str]]

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def replicas(self) -> int:
        return int(self.manifest["spec"].get("replicas", 1))

    @property
    def template(self) -> Object:
        """Metadata and spec of the pods."""
        found: Object = self.manifest if self.manifest["kind"] == "Pod" else self.manifest["spec"]["template"]
        return found

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def pod(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def containers(self) -> list[Container]:
        return [Container(self.pod, spec, self.secrets) for spec in self.pod["containers"]]

    @property
    def init_containers(self) -> list[Container]:
        return [Container(self.pod, spec, self.secrets) for spec in self.pod.get("initContainers", ())]


@dataclass(frozen=True)
class Rendered:
    """All objects of a release."""

    objects: tuple[Object, ...]
    notes: str

    def of(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    @cached_property
    def secrets(self) -> dict[str, dict[str, str]]:
        """Name → key → text."""
        return {
            one["metadata"]["name"]: {
                **{key: base64.b64decode(value).decode() for key, value in one.get("data", {}).items()},
                **one.get("stringData", {}),
            }
            for one in self.of("Secret")
        }

    @cached_property
    def workloads(self) -> list[Workload]:
        return [Workload(one, self.secrets) for one in self.of("Deployment", "StatefulSet", "Pod")]

    def workload(self, component: str) -> Workload:
        """The one of "gateway", "engine", "redis", "s3" or "test"."""
        (found,) = [workload for workload in self.workloads if workload.component == component]
        return found


@functools.cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def files(*values: Mapping[str, Any], upgrade: bool = False) -> dict[str, str]:
    """Template → text, with exactly these values over the chart's.

    Raises:
        helm_python.HelmError: the schema refuses the values, or a template does.
    """
    return _chart().render(
        merged(*values), name=RELEASE, namespace=NAMESPACE, is_install=not upgrade, is_upgrade=upgrade
    )


def parsed(texts: Mapping[str, str]) -> Rendered:
    """The objects of rendered templates."""
    notes = "".join(text for path, text in texts.items() if path.endswith("NOTES.txt"))
    ordered = [text for path, text in sorted(texts.items()) if path.endswith(".yaml")]
    return Rendered(tuple(one for text in ordered for one in documents(text)), notes)


def render(*values: Mapping[str, Any], upgrade: bool = False) -> Rendered:
    """The release with these values over the chart's, and images from a registry.

    Raises:
        helm_python.HelmError: the schema refuses the values, or a template does.
    """
    return parsed(files(OURS, *values, upgrade=upgrade))


def documents(text: str) -> Iterator[Object]:
    for document in yaml.load_all(text, Loader=_NoDuplicates):
        if document is not None:
            yield json.loads(json.dumps(document))


class _NoDuplicates(yaml.CSafeLoader):
    """Kubernetes takes the last of two equal keys without a word; here they are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]  # type: ignore[no-untyped-call]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep=deep)
