"""Dashboards, alerts and the page of metrics, made from code: `python -m observability.generate [--check]`.

Nothing here runs in a service. What is written goes to charts/temper/dashboards, charts/temper/rules and docs/guides.
"""
