"""What the chart does with what it finds in a cluster: drawn Secrets stay at an upgrade, and claims say who may mount
them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.chart.api_server import serving
from tests.chart.render import CHART, NAMESPACE, OURS, RELEASE, Rendered, merged, parsed

Objects = dict[tuple[str, str, str], Mapping[str, Any]]
SHARED: Mapping[str, Any] = {"engine": {"replicas": 2, "model": {"source": "claim", "existingClaim": "c"}}}


@pytest.fixture
def objects() -> Objects:
    return {}


@pytest.fixture
def cluster(objects: Objects) -> Iterator[helm_python.Config]:
    with (
        serving(objects) as kubeconfig,
        helm_python.Config(kubeconfig_content=kubeconfig, namespace=NAMESPACE) as found,
    ):
        yield found


def rendered(cluster: helm_python.Config, *values: Mapping[str, Any], upgrade: bool = False) -> Rendered:
    with helm_python.Chart.load(CHART) as chart:
        given = merged(OURS, *values)
        return parsed(cluster.render(chart, given, name=RELEASE, namespace=NAMESPACE, is_upgrade=upgrade))


def applied(objects: Objects, release: Rendered) -> None:
    """Secrets as the API has them: what was text is base64."""
    for name, keys in release.secrets.items():
        data = {key: base64.b64encode(text.encode()).decode() for key, text in keys.items()}
        objects[NAMESPACE, "secrets", name] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "data": data,
        }


def test_what_was_drawn_stays(cluster: helm_python.Config, objects: Objects) -> None:
    first = rendered(cluster)
    assert set(first.secrets["demo-temper-s3"]) == {"access-key", "secret-key", "tls.crt", "tls.key"}
    assert rendered(cluster).secrets != first.secrets, "nothing is there yet: others are drawn"
    applied(objects, first)
    assert rendered(cluster, upgrade=True).secrets == first.secrets
    assert rendered(cluster, {"redis": {"persistence": {"size": "9Gi"}}}, upgrade=True).secrets == first.secrets


def test_a_secret_of_an_earlier_version_gets_what_it_lacks(cluster: helm_python.Config, objects: Objects) -> None:
    first = rendered(cluster)
    applied(objects, first)
    data = dict(objects[NAMESPACE, "secrets", "demo-temper-s3"]["data"])
    del data["tls.crt"], data["tls.key"]
    objects[NAMESPACE, "secrets", "demo-temper-s3"] = {
        **objects[NAMESPACE, "secrets", "demo-temper-s3"],
        "data": data,
    }
    later = rendered(cluster, upgrade=True).secrets["demo-temper-s3"]
    assert later["secret-key"] == first.secrets["demo-temper-s3"]["secret-key"]
    certificate = x509.load_pem_x509_certificate(later["tls.crt"].encode())
    key = load_pem_private_key(later["tls.key"].encode(), None)
    assert certificate.public_key() == key.public_key()
    certificate.verify_directly_issued_by(certificate)


def claim(*modes: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "c", "namespace": NAMESPACE},
        "spec": {"accessModes": list(modes)},
    }


@pytest.mark.parametrize("modes", [("ReadWriteMany",), ("ReadWriteOnce", "ReadOnlyMany")])
def test_a_claim_that_several_may_mount(modes: tuple[str, ...], cluster: helm_python.Config, objects: Objects) -> None:
    objects[NAMESPACE, "persistentvolumeclaims", "c"] = claim(*modes)
    assert rendered(cluster, SHARED).workload("engine").replicas == 2


@pytest.mark.parametrize("modes", [("ReadWriteOnce",), ("ReadWriteOncePod",)])
@pytest.mark.parametrize("said", ["", "ReadWriteMany"])
def test_a_claim_that_one_may_mount_whatever_is_said(
    modes: tuple[str, ...], said: str, cluster: helm_python.Config, objects: Objects
) -> None:
    objects[NAMESPACE, "persistentvolumeclaims", "c"] = claim(*modes)
    values = merged(SHARED, {"engine": {"model": {"claimAccessMode": said}}})
    wanted = re.escape(f"to be mounted by 2 engines, and its access mode is {modes[0]}: ReadOnlyMany or ReadWriteMany")
    with pytest.raises(helm_python.HelmError, match=wanted):
        rendered(cluster, values)


def test_a_claim_that_is_not_there_yet(cluster: helm_python.Config) -> None:
    with pytest.raises(helm_python.HelmError, match="access mode is not known"):
        rendered(cluster, SHARED)
    said = merged(SHARED, {"engine": {"model": {"claimAccessMode": "ReadOnlyMany"}}})
    assert rendered(cluster, said).workload("engine").replicas == 2
