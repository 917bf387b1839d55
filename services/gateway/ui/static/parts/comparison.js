// Targets of evaluations side by side: scores with intervals, and what each gained over the first one.

import { html, useState } from "../vendor/htm-preact.js";
import { get } from "../core/api.js";
import { number, percent } from "../core/format.js";
import { useLoaded } from "../core/hooks.js";
import { Card, Chip, Empty, Interval, Loaded, Table } from "./basics.js";
import { Select } from "./form.js";

const ITEMS = 50;
const isShare = (entry) => entry.mean >= 0 && entry.mean <= 1 && entry.interval;
const score = (row) => (isShare(row) ? percent(row.mean, 1) : number(row.mean));

function Verdict({ found, better, first }) {
  if (first) return html`<span class="muted">the first one</span>`;
  const { low, high } = found?.interval ?? {};
  if (low === undefined) return html`<span class="muted">–</span>`;
  const up = better === "lower" ? high < 0 : low > 0;
  const down = better === "lower" ? low > 0 : high < 0;
  return html`<${Chip} tone=${up ? "good" : down ? "bad" : ""}>${up ? "better" : down ? "worse" : "no difference seen"}<//>`;
}

export function Comparison({ of }) {
  const compared = useLoaded(() => get("/v1/evaluations/compare", { of }), [of.join()]);
  const columns = (entries) => [
    { name: "Suite", value: (row) => row.suite },
    { name: "Target", wide: true, value: (row) => entries[row.entry].label },
    { name: "Score", numeric: true, value: score },
    { name: "95 % interval", value: (row) => (isShare(row) ? html`<${Interval} low=${row.interval.low} high=${row.interval.high} middle=${row.mean} />` : "–") },
    { name: "Gain", numeric: true, value: (row) => (row.with_first ? `${row.with_first.gain >= 0 ? "+" : ""}${percent(row.with_first.gain, 1)}` : "–") },
    { name: "Its interval", value: (row) => (row.with_first?.interval ? html`<${Interval} from=${-1} to=${1} low=${row.with_first.interval.low} high=${row.with_first.interval.high} middle=${row.with_first.gain} />` : "–") },
    { name: "p", numeric: true, value: (row) => number(row.with_first?.p) },
    { name: "Better / worse", numeric: true, value: (row) => (row.with_first ? `${row.with_first.better} / ${row.with_first.worse}` : "–") },
    { name: "", hidden: "Verdict", value: (row) => html`<${Verdict} found=${row.with_first} better=${row.better} first=${row.entry === 0} />` },
  ];
  return html`
    <${Card} wide title="Comparison">
      <${Loaded} state=${compared} empty=${(found) => !found.data.length && html`<${Empty} title="Nothing to compare yet">Scores are there when a run has ended.<//>`}>
        ${(found) => html`<${Table} label="Comparison" columns=${columns(found.entries)} rows=${found.data} keyOf=${(row) => `${row.suite}/${row.entry}`} />`}
      <//>
    <//>
  `;
}

/** Items of a run, the answers of all its targets beside each other. */
export function Items({ run }) {
  const [suite, setSuite] = useState(run.suites[0].suite);
  const [only, setOnly] = useState("all");
  const [shown, setShown] = useState(ITEMS);
  const targets = run.targets.map((target) => target.name);
  const load = async () => {
    const pages = await Promise.all([
      get(`/v1/eval/suites/${encodeURIComponent(suite)}/items`, { limit: shown }).catch(() => ({ data: [] })),
      ...targets.map((target) => get(`/v1/evaluations/${run.id}/items`, { suite, target, limit: shown })),
    ]);
    const [items, ...answers] = pages;
    const asked = new Map(items.data.map((item) => [item.index, item]));
    const rows = answers[0].data.map((first) => ({
      id: first.item,
      asked: asked.get(first.index),
      answers: answers.map((page) => page.data.find((one) => one.index === first.index)),
    }));
    return { rows, total: answers[0].total };
  };
  const loaded = useLoaded(load, [run.id, suite, shown]);
  const wanted = (row) => {
    const scores = row.answers.map((one) => one?.score);
    if (only === "wrong") return scores.some((one) => one !== 1);
    return only === "all" || new Set(scores).size > 1;
  };
  const prompt = (item) => item?.prompt ?? item?.messages?.at(-1)?.content ?? "–";
  const columns = [
    { name: "Item", value: (row) => row.id },
    { name: "Prompt", wide: true, value: (row) => prompt(row.asked) },
    { name: "Expected", value: (row) => row.asked?.expected?.join(" or ") ?? "–" },
    ...targets.map((target, index) => ({
      name: target,
      wide: true,
      value: (row) => {
        const found = row.answers[index];
        if (!found) return html`<span class="muted">not yet</span>`;
        return html`<${Chip} tone=${found.score === 1 ? "good" : "bad"}>${number(found.score)}<//> ${found.answers[0]?.text ?? ""} ${found.answers[0]?.reason && html`<span class="muted">${found.answers[0].reason}</span>`}`;
      },
    })),
  ];
  return html`
    <${Card} wide title="Item by item">
      <div class="fields filter">
        <${Select} label="Suite" value=${suite} change=${setSuite} options=${run.suites.map((one) => one.suite)} />
        <${Select} label="Show" value=${only} change=${setOnly} options=${[["all", "every item"], ["wrong", "not all right"], ["different", "where targets differ"]]} />
      </div>
      <${Loaded} state=${loaded}>
        ${(found) => html`
          <${Table} label="Items" columns=${columns} rows=${found.rows.filter(wanted)} empty=${html`<${Empty} title="No item is like this">Show every item to see them.<//>`} />
          ${found.total > found.rows.length && html`<button onClick=${() => setShown(shown + ITEMS)}>More of ${number(found.total)}</button>`}
        `}
      <//>
    <//>
  `;
}
