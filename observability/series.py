"""Selectors of series, in queries of dashboards and in rules.

Every series has the labels `namespace`, `pod` and `release` of the chart's ServiceMonitors. A dashboard's variables
choose among them. Rules match any of them; the chart puts a release's own in the place of `namespace=~".*"` and
`release=~".*"`, so that two releases in a cluster do not alert for each other, and its own claims in the place of all.
"""

from __future__ import annotations

ANY_NAMESPACE = 'namespace=~".*"'
ANY_RELEASE = 'release=~".*"'
ANY_VOLUME = 'persistentvolumeclaim=~".*"'
"""Placeholder that the chart replaces."""
PLACE = "namespace, release"
"""Labels that rules keep: what an alert is about."""

_CHOSEN_NAMESPACE = 'namespace=~"$namespace"'
_CHOSEN = (_CHOSEN_NAMESPACE, 'release=~"$release"', 'pod=~"$pod"')


def chosen(name: str, *matchers: str) -> str:
    """A series of ours where a dashboard's variables point."""
    return _select(name, *_CHOSEN, *_own(name), *matchers)


def _own(name: str) -> tuple[str, ...]:
    """Matchers of what a gateway of one engine exports for it as well, which would count twice."""
    return ('component="engine"',) if name.startswith("vllm:") else ()


def everywhere(name: str, *matchers: str) -> str:
    """A series of ours where a dashboard's variables point, but in every pod: of what all pods say alike."""
    return _select(name, *_CHOSEN[:2], *matchers)


def around(name: str, *matchers: str) -> str:
    """Another exporter's series, which has no release, in the dashboard's namespaces."""
    return _select(name, _CHOSEN_NAMESPACE, *matchers)


def ours(name: str, *matchers: str) -> str:
    """A series of ours in a rule."""
    return _select(name, ANY_NAMESPACE, ANY_RELEASE, *_own(name), *matchers)


def beside(name: str, *matchers: str) -> str:
    """Another exporter's series in a rule."""
    return _select(name, ANY_NAMESPACE, *matchers)


def rate(selector: str, window: str = "$__rate_interval") -> str:
    """Per second."""
    return f"rate({selector}[{window}])"


def total(expression: str, by: str = "") -> str:
    """Summed, by labels if there are some."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def quantile(share: float, buckets: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Quantile of a histogram.

    Args:
        share: 0.95 for p95.
        buckets: selector of its `_bucket`.
        by: labels to keep.
    """
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {total(rate(buckets, window), labels)})"


def _select(name: str, *matchers: str) -> str:
    return f"{name}{{{','.join(matchers)}}}"
