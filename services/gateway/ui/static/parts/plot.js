// Plots: uPlot in the page's colours, resized with their place. Loaded when the first one is shown.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";

const TONES = 9;
let library;
const load = () => (library ??= import("../vendor/uplot.js").then((module) => module.default));

/** Distances that ticks of the x axis may have, none below the least. */
const xSteps = (least) => [1, 2, 5, 10, 15, 30, 60, 100, 120, 200, 300, 500, 600, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5].filter((one) => one >= least);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Where no pointer is, the legend has the latest values. */
function showLatest(plot) {
  const points = plot.data[0].length;
  if (points && (plot.cursor.idx ?? null) === null) plot.setLegend({ idx: points - 1 }, false);
}

function options(element, { series, height, unit, format, xFormat, xStep, xFloor, zero, log }) {
  const ink = colour("--muted");
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { show: false }, font: "12px system-ui" };
  return {
    width: element.clientWidth,
    height,
    padding: [8, 8, 0, 0],
    cursor: { points: { size: 6 }, drag: { x: true, y: false } },
    legend: { live: true },
    hooks: { setCursor: [showLatest], setData: [showLatest] },
    scales: {
      x: { time: false, range: xFloor === null ? undefined : ({ data: [xs] }) => [Math.min(xs[0] ?? 0, xFloor), xs.at(-1) ?? 0] },
      y: { distr: log ? 3 : 1, range: zero ? (_, low, high) => [0, Math.max(high ?? 0, zero) * 1.1] : undefined },
    },
    axes: [
      { ...axis, size: 28, incrs: xSteps(xStep), values: (_, ticks) => ticks.map((tick) => xFormat(tick)) },
      { ...axis, size: 60, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))) },
    ],
    series: [
      { label: unit, value: (_, value) => (value === null ? "–" : xFormat(value)) },
      ...series.map((one, index) => ({
        label: one.label,
        stroke: colour(`--tone-${(one.tone ?? index) % TONES}`),
        width: 1.75,
        dash: one.dash,
        spanGaps: one.spanGaps ?? false,
        points: { show: one.points ?? false, size: 5 },
        value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
      })),
    ],
  };
}

/** `xFloor`: the x axis begins there or before; `zero`: the y axis begins at 0 and goes to this at least.
 *  data: [xs, ys, …] as uPlot has them; series: [{label, tone, dash}]. `summary` says in words what is seen. */
export function Plot({ data, series, height = 180, unit = "", format = String, xFormat = String, summary, xStep = 1, xFloor = null, zero = 0, log = false }) {
  const place = useRef(null);
  const plot = useRef(null);
  const latest = useRef(data);
  latest.current = data;
  const [scheme, setScheme] = useState(0);
  const shape = JSON.stringify([series, height, unit, log, scheme]);
  useEffect(() => {
    const changed = () => setScheme((before) => before + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", changed);
    addEventListener("temper-theme", changed);
    return () => {
      dark.removeEventListener("change", changed);
      removeEventListener("temper-theme", changed);
    };
  }, []);
  useEffect(() => {
    let gone = false;
    let watch;
    load().then((UPlot) => {
      if (gone) return;
      const element = place.current;
      plot.current = new UPlot(options(element, { series, height, unit, format, xFormat, xStep, xFloor, zero, log }), latest.current, element);
      watch = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height }));
      watch.observe(element);
    });
    return () => {
      gone = true;
      watch?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(data), [data]);
  return html`<figure class=${`plot ${unit ? "" : "no-x"}`} aria-label=${summary}><div ref=${place} style=${{ minHeight: `${height}px` }}></div></figure>`;
}
