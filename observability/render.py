"""Grafana's JSON of a dashboard, through Grafana's own types: a field that it does not know does not type-check."""

from __future__ import annotations

import json
from string import ascii_uppercase

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import dashboard as grafana

from observability.board import Board, Panel, Place, Query, Row, arrange

RUNBOOKS = "RUNBOOKS_URL"
"""Placeholder that the chart replaces by the address of the runbooks."""
_SOURCE = grafana.DataSourceRef("prometheus", "${datasource}")
_ALL = ".*"
"""Also matches a series without the label, as of a Prometheus outside of Kubernetes."""


def render(board: Board) -> str:
    """The dashboard as a file's content."""
    rows_and_panels: list[grafana.Panel | grafana.RowPanel] = []
    for number, (item, place) in enumerate(arrange(board), start=1):
        made = _row(item, place, number) if isinstance(item, Row) else _panel(item, place, number)
        rows_and_panels.append(made)
    made_board = grafana.Dashboard(
        uid=f"temper-{board.name}",
        title=board.title,
        description=board.description,
        tags=["temper"],
        timezone="browser",
        graph_tooltip=grafana.DashboardCursorSync.CROSSHAIR,
        time=grafana.DashboardDashboardTime("now-1h", "now"),
        refresh="30s",
        panels=rows_and_panels,
        templating=grafana.DashboardDashboardTemplating(_variables()),
        links=[
            grafana.DashboardLink(
                title="Temper",
                type_val=grafana.DashboardLinkType.DASHBOARDS,
                tags=["temper"],
                as_dropdown=True,
                include_vars=True,
                keep_time=True,
            ),
            grafana.DashboardLink(
                title="Runbooks",
                type_val=grafana.DashboardLinkType.LINK,
                url=f"{RUNBOOKS}/README.md",
                target_blank=True,
            ),
        ],
    )
    return json.dumps(made_board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variables() -> list[grafana.VariableModel]:
    source = grafana.VariableModel(
        type_val=grafana.VariableType.DATASOURCE, name="datasource", label="Data source", query="prometheus"
    )
    return [
        source,
        _labels("namespace", "Namespace", "label_values(temper_build_info, namespace)"),
        _labels("release", "Release", 'label_values(temper_build_info{namespace=~"$namespace"}, release)'),
        _labels("pod", "Pod", 'label_values(temper_build_info{namespace=~"$namespace",release=~"$release"}, pod)'),
    ]


def _labels(name: str, label: str, query: str) -> grafana.VariableModel:
    return grafana.VariableModel(
        type_val=grafana.VariableType.QUERY,
        name=name,
        label=label,
        query=query,
        datasource=_SOURCE,
        refresh=grafana.VariableRefresh.ON_TIME_RANGE_CHANGED,
        sort=grafana.VariableSort.ALPHABETICAL_ASC,
        multi=True,
        include_all=True,
        all_value=_ALL,
        current=grafana.VariableOption(text="All", value="$__all", selected=True),
    )


def _row(row: Row, place: Place, number: int) -> grafana.RowPanel:
    return grafana.RowPanel(title=row.title, id_val=number, grid_pos=_position(place), panels=[])


def _panel(panel: Panel, place: Place, number: int) -> grafana.Panel:
    types = {"graph": "timeseries", "stack": "timeseries", "number": "stat", "table": "table"}
    return grafana.Panel(
        type_val=types[panel.kind],
        id_val=number,
        title=panel.title,
        description=panel.description,
        datasource=_SOURCE,
        grid_pos=_position(place),
        targets=[_target(panel, query, letter) for query, letter in zip(panel.queries, ascii_uppercase, strict=False)],
        links=[
            grafana.DashboardLink(
                title=name, type_val=grafana.DashboardLinkType.LINK, url=f"{RUNBOOKS}/{name}.md", target_blank=True
            )
            for name in panel.alerts
        ],
        options=_options(panel),
        field_config=grafana.FieldConfigSource(_field(panel), []),
    )


def _target(panel: Panel, query: Query, letter: str) -> prometheus.Dataquery:
    as_table = panel.kind == "table"
    return prometheus.Dataquery(
        expr=query.expr,
        legend_format=query.legend or None,
        ref_id=letter,
        datasource=_SOURCE,
        instant=as_table,
        range_val=not as_table,
        exemplar=query.exemplars,
        format_val=prometheus.PromQueryFormat.TABLE if as_table else prometheus.PromQueryFormat.TIME_SERIES,
        editor_mode=prometheus.QueryEditorMode.CODE,
    )


def _options(panel: Panel) -> object:
    if panel.kind == "table":
        return table.Options(cell_height=common.TableCellHeight.SM)
    if panel.kind == "number":
        return stat.Options(
            graph_mode=common.BigValueGraphMode.AREA,
            color_mode=common.BigValueColorMode.VALUE,
            justify_mode=common.BigValueJustifyMode.AUTO,
            text_mode=common.BigValueTextMode.AUTO,
            orientation=common.VizOrientation.AUTO,
            reduce_options=common.ReduceDataOptions(calcs=["lastNotNull"], fields="", values=False),
        )
    return timeseries.Options(
        legend=common.VizLegendOptions(
            display_mode=common.LegendDisplayMode.LIST,
            placement=common.LegendPlacement.BOTTOM,
            show_legend=True,
            calcs=[],
        ),
        tooltip=common.VizTooltipOptions(mode=common.TooltipDisplayMode.MULTI, sort=common.SortOrder.DESCENDING),
    )


def _field(panel: Panel) -> grafana.FieldConfig:
    steps = [grafana.Threshold(None, panel.base), *(grafana.Threshold(value, color) for value, color in panel.steps)]
    lines = panel.kind in ("graph", "stack")
    mode = grafana.FieldColorModeId.PALETTE_CLASSIC if lines else grafana.FieldColorModeId.THRESHOLDS
    return grafana.FieldConfig(
        unit=panel.unit,
        decimals=panel.decimals,
        min_val=panel.low,
        max_val=panel.high,
        color=grafana.FieldColor(mode),
        thresholds=grafana.ThresholdsConfig(grafana.ThresholdsMode.ABSOLUTE, steps),
        custom=_lines(panel) if lines else None,
    )


def _lines(panel: Panel) -> common.GraphFieldConfig:
    stacked = panel.kind == "stack"
    shown = common.GraphThresholdsStyleMode.DASHED if panel.steps else common.GraphThresholdsStyleMode.OFF
    return common.GraphFieldConfig(
        draw_style=common.GraphDrawStyle.LINE,
        line_width=1,
        fill_opacity=30 if stacked else 10,
        show_points=common.VisibilityMode.NEVER,
        span_nulls=False,
        stacking=common.StackingConfig(mode=common.StackingMode.NORMAL if stacked else common.StackingMode.NONE),
        thresholds_style=common.GraphThresholdsStyleConfig(shown),
    )


def _position(place: Place) -> grafana.GridPos:
    return grafana.GridPos(h=place.height, w=place.width, x=place.x, y=place.y)
