"""Which values the chart is tried with: every values file, every choice of every axis alone, and pairs of choices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from tests.chart.render import REGISTRY, merged, values_file

Values = Mapping[str, Any]
DIGEST = "0123456789abcdef" * 4
PEERS = (
    *("gatewayFrom", "monitoringFrom", "redisFrom", "objectStoreFrom", "dnsTo", "redisTo"),
    *("objectStoreTo", "modelSourceTo", "otlpTo", "webhookTo", "credentialsTo", "proxyTo"),
)
OUTSIDE = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "somewhere"}}}]
_MORE: Values = {
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "envFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/etc/more"}],
    "initContainers": [
        {
            "name": "first",
            "image": f"{REGISTRY}/tools:1",
            "resources": {bound: {"cpu": "100m", "memory": "64Mi"} for bound in ("requests", "limits")},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
    ],
}

AXES: Mapping[str, Mapping[str, Values]] = {
    "model": {
        "image": {},
        "claim": {
            "engine": {
                "model": {
                    "source": "claim",
                    "existingClaim": "checkpoints",
                    "path": "qwen/4b",
                    "claimAccessMode": "ReadOnlyMany",
                }
            }
        },
        "s3 of the release": {"engine": {"model": {"source": "s3", "s3": {"uri": "s3://m/4b"}, "digest": DIGEST}}},
        "s3 elsewhere": {
            "engine": {
                "model": {
                    "source": "s3",
                    "digest": "unchecked",
                    "s3": {"uri": "s3://m", "endpoint": "s3.example.com", "region": "eu-1", "existingSecret": "model"},
                }
            }
        },
        "s3 by identity": {
            "engine": {
                "model": {
                    "source": "s3",
                    "digest": "unchecked",
                    "s3": {"uri": "s3://m/4b", "endpoint": "s3.example.com", "credentials": "chain"},
                }
            }
        },
        "hub": {
            "engine": {
                "model": {
                    "source": "huggingface",
                    "digest": f"sha256:{DIGEST}",
                    "huggingface": {"repository": "Qwen/Qwen3.5-4B@main", "existingSecret": "hub"},
                    "sharedClaim": "shared",
                    "claimAccessMode": "ReadWriteMany",
                }
            }
        },
    },
    "redis": {
        "bundled": {},
        "external": {"redis": {"bundled": False, "external": {"existingSecret": "redis-url", "port": 6380}}},
        "a Secret": {"redis": {"existingSecret": "redis-password"}},
        "sentinels": {
            "redis": {
                "bundled": False,
                "external": {"existingSecret": "redis-url", "port": 6380, "sentinelPort": 26379},
            }
        },
    },
    "store": {
        "bundled": {},
        "a Secret": {"objectStore": {"existingSecret": "s3-keys"}},
        "identity": {
            "objectStore": {"bundled": False, "external": {"endpoint": "s3.example.com", "credentials": "chain"}}
        },
        "external": {
            "objectStore": {
                "bundled": False,
                "external": {"endpoint": "minio.storage.svc:9000", "secure": False, "existingSecret": "s3"},
            }
        },
        "https": {
            "objectStore": {
                "bundled": False,
                "bucket": "temper-prod",
                "external": {"endpoint": "s3.example.com", "region": "eu-central-1", "existingSecret": "s3"},
            }
        },
    },
    "engines": {
        "one": {},
        "two": {"engine": {"replicas": 2}},
        "scaled": {"engine": {"autoscaling": {"enabled": True, "minReplicas": 2}}},
        "scaled by an HPA": {"engine": {"autoscaling": {"enabled": True, "scaler": "hpa"}}},
        "scaled to zero": {
            "engine": {
                "autoscaling": {
                    "enabled": True,
                    "minReplicas": 0,
                    "prometheusMetadata": {"authModes": "bearer"},
                    "authenticationRef": {"name": "prometheus", "kind": "TriggerAuthentication"},
                    "fallback": {"behavior": "static", "replicas": 3},
                }
            }
        },
        "MIG": {
            "engine": {
                "gpu": {"resource": "nvidia.com/mig-3g.40gb"},
                "quantization": "fp8",
                "kvCacheDtype": "fp8",
                "runtimeClassName": "nvidia",
                "nodeSelector": {"nvidia.com/mig.config": "all-balanced"},
                "env": {"TEMPER_MAX_NUM_SEQS": 1000, "TEMPER_PROGRAMMATIC_LAUNCH": False, "TEMPER_TPOT_SLO_MS": 5.5},
            }
        },
        "CPU": values_file("cpu-demo"),
        "no trainer": {"engine": {"trainer": {"enabled": False}}},
        "webhooks": {
            "engine": {"trainer": {"webhooks": "https://grader.example.com", "webhookExistingSecret": "webhook"}},
            "networkPolicy": {"webhookPorts": [443, 8443]},
        },
    },
    "tiers": {
        "host": {},
        "none": {"engine": {"tiers": {"names": ""}, "kvEvents": {"enabled": True, "from": OUTSIDE}}},
        "node's disk": {"engine": {"tiers": {"names": "host,disk", "hostBytes": "1Gi", "diskBytes": "100Gi"}}},
        "all": {
            "engine": {
                "tiers": {
                    "names": "host,disk,store",
                    "diskPersistent": True,
                    "diskBytes": "80Gi",
                    "storeBytes": "4Gi",  # the smallest object store, of the demo, has 5Gi
                },
                "persistence": {"size": "100Gi", "storageClassName": "fast"},
                "kvEvents": {"enabled": True},
            }
        },
    },
    "gateways": {
        "two": {},
        "one": {"gateway": {"replicas": 1, "podDisruptionBudget": {"enabled": False}}},
        "scaled": {"gateway": {"autoscaling": {"enabled": True}}},
        "keys": {
            "gateway": {
                "apiKeys": {"existingSecret": "keys", "key": "file.json"},
                "env": {"TEMPER_KEY_REQUESTS_PER_MINUTE": 1000000},
                "podAnnotations": {"team": "ai"},
                "podLabels": {"cost-center": "42"},
            },
            "test": {"apiKeyExistingSecret": "test-key"},
        },
    },
    "pool": {
        "none": {},
        "members": {"engine": {"http": {"enabled": True}}},
        "members of one proxy": {
            "engine": {
                "http": {"enabled": True, "from": OUTSIDE},
                "servedModelName": "Qwen/Qwen3.5-4B",
                "podLabels": {"llm-d.ai/role": "decode"},
            }
        },
        "published": {
            "engine": {"http": {"enabled": True}, "kvEvents": {"enabled": True}},
            "gateway": {"apiKeys": {"allowNone": True}},
            "inferencePool": {
                "enabled": True,
                "endpointPicker": {"service": "temper-epp", "failureMode": "FailOpen"},
                "objectives": [{"name": "chat", "priority": 10}, {"name": "batch", "priority": -10}],
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "inference", "namespace": "gateways"}]},
            },
        },
    },
    "entry": {
        "service": {},
        "load balancer": {
            "gateway": {
                "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
                "apiKeys": {"allowNone": True},
            }
        },
        "ingress": {
            "gateway": {
                "ingress": {"enabled": True, "className": "traefik", "tlsSecret": "tls", "annotations": {"a": "b"}},
                "apiKeys": {"existingSecret": "keys"},
            },
            "test": {"apiKeyExistingSecret": "test-key"},
        },
        "route": {
            "gateway": {
                "apiKeys": {"allowNone": True},
                "publicPaths": ["/v1/chat", "/v1/models"],
                "httpRoute": {
                    "enabled": True,
                    "parentRefs": [{"name": "public", "namespace": "gateways"}],
                    "hostnames": ["temper.example.com"],
                },
            }
        },
    },
    "tls": {
        "off": {},
        "own CA": {"tls": {"enabled": True}},
        "issuer": {"tls": {"enabled": True, "certManager": {"issuerRef": {"name": "corp", "kind": "ClusterIssuer"}}}},
        "given": {
            "tls": {"enabled": True, "gatewayExistingSecret": "gateway-tls", "engineExistingSecret": "engine-tls"}
        },
    },
    "watched": {
        "off": {},
        "all": {
            "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
            "telemetry": {"otlpEndpoint": "http://collector.monitoring.svc:4317", "traceRatio": 0.1},
        },
        "traces with a token": {
            "telemetry": {"otlpEndpoint": "https://otlp.example.com", "headersExistingSecret": "otlp"},
            "env": {"TEMPER_LOG_LEVEL": "debug"},
        },
        "metrics alone": {"monitoring": {"enabled": True, "rules": False, "dashboards": False}},
    },
    "network": {
        "open to clients": {},
        "narrow": {
            "networkPolicy": dict.fromkeys(PEERS, OUTSIDE),
        },
        "none": {"networkPolicy": {"enabled": False}},
    },
    "place": {
        "anywhere": {},
        "mirror": {"global": {"imageRegistry": "mirror.example.com:5000/temper", "imagePullSecrets": ["pull"]}},
        "chosen": {
            "priorityClasses": {"create": True},
            "gateway": {"affinity": {"podAntiAffinity": {}}, "tolerations": [{"operator": "Exists"}]},
            "engine": {
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
                ]
            },
            "redis": {"persistence": {"storageClassName": "fast"}, "nodeSelector": {"disk": "ssd"}},
        },
        "OpenShift": {"global": {"openshift": True}},
        "beside": {
            "caBundle": {"configMap": "authorities", "key": "all.pem"},
            "proxy": {
                "https": "http://proxy.example.com:3128",
                "http": "http://proxy.example.com:3128",
                "noProxy": [".example.internal"],
            },
            "extraObjects": [
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "mine"},
                    "data": {"of": "{{ .Release.Name }}"},
                },
                "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-text\ndata: {}\n",
            ],
            "gateway": {**_MORE, "podSecurityContext": {"supplementalGroups": [7]}},
            "engine": {**_MORE, "securityContext": {"runAsUser": 4711}},
        },
        "one account": {"serviceAccount": {"create": False, "name": "temper"}, "fullnameOverride": "t"},
    },
}


def combinations() -> dict[str, Values]:
    """Name → values. The same at every call."""
    found: dict[str, Values] = {"defaults": {}}
    for name in ("cpu-demo", "single-gpu", "multi-gpu", "air-gapped"):
        found[f"values-{name}"] = values_file(name)
        found[f"values-{name} + values-mtls"] = merged(values_file(name), values_file("mtls"))
    for axis, choices in AXES.items():
        for choice, values in choices.items():
            if values:
                found[f"{axis}: {choice}"] = values
    found.update(_pairs())
    return found


def _pairs() -> Iterator[tuple[str, Values]]:
    """Rows in which every two choices of different axes meet, found greedily."""
    axes = {axis: tuple(choices) for axis, choices in AXES.items()}
    wanted = {
        frozenset(((one, a), (other, b)))
        for one, other in itertools.combinations(axes, 2)
        for a, b in itertools.product(axes[one], axes[other])
    }
    rng = random.Random(1)
    while wanted:
        best: tuple[int, dict[str, str]] = (0, {})
        for _ in range(30):
            start = dict(rng.choice(sorted(map(sorted, wanted))))
            row = {axis: start.get(axis) or rng.choice(choices) for axis, choices in axes.items()}
            gain = len(wanted & set(map(frozenset, itertools.combinations(row.items(), 2))))
            best = max(best, (gain, row), key=lambda pair: pair[0])
        wanted -= set(map(frozenset, itertools.combinations(best[1].items(), 2)))
        values = merged(*(AXES[axis][choice] for axis, choice in best[1].items()))
        # A model on the CPU is neither quantized nor in need of a GPU's node.
        if best[1]["engines"] == "CPU":
            values = merged(values, values_file("cpu-demo"))
        yield " / ".join(best[1].values()), values
