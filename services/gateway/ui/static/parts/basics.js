// Small components that every page uses: headings, states of loading, chips, tables, bars.

import { html, useState } from "../vendor/htm-preact.js";
import { number, percent } from "../core/format.js";

export function Page({ title, note, actions, children }) {
  return html`
    <header class="page-head">
      <div>
        <h1>${title}</h1>
        ${note && html`<p class="muted">${note}</p>`}
      </div>
      <div class="row">${actions}</div>
    </header>
    ${children}
  `;
}

export function Card({ title, actions, children, wide = false }) {
  return html`
    <section class=${`card ${wide ? "wide" : ""}`}>
      ${(title || actions) &&
      html`<header class="card-head"><h2>${title}</h2><div class="row">${actions}</div></header>`}
      ${children}
    </section>
  `;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p><div class="muted">${children}</div></div>`;
}

export function Failure({ error, retry }) {
  return html`
    <div class="failure" role="alert">
      <p><strong>${error.status === 403 ? "Your key may not see this" : "This did not work"}.</strong> ${error.message}</p>
      ${retry && html`<button onClick=${retry}>Try again</button>`}
    </div>
  `;
}

/** What was loaded, or why it was not; `empty` says that there is nothing. */
export function Loaded({ state, empty, children }) {
  if (state.error && state.data === undefined) return html`<${Failure} error=${state.error} retry=${state.reload} />`;
  if (state.data === undefined) return html`<p class="muted loading" role="status">Loading …</p>`;
  const nothing = empty && empty(state.data);
  return html`
    ${state.error && html`<${Failure} error=${state.error} retry=${state.reload} />`} ${nothing || children(state.data)}
    <${LeftOut} of=${state.data} />
  `;
}

/** What is not in a list because a later release of Temper wrote it. */
function LeftOut({ of }) {
  if (!of.unreadable?.length) return null;
  const ids = of.unreadable.map((one) => one.id).join(", ");
  return html`<p class="muted" role="note">Not shown, as a later release of Temper wrote ${of.unreadable.length === 1 ? "it" : "them"}: ${ids}</p>`;
}

const TONES = {
  succeeded: "good", completed: "good", ready: "good", attached: "good", current: "good", decode: "good", valid: "good",
  running: "busy", in_progress: "busy", finalizing: "busy", prefill: "busy", validating: "busy", cancelling: "busy",
  failed: "bad", expired: "bad", away: "bad", open: "bad", revoked: "bad",
};

export function Chip({ children, tone }) {
  return html`<span class=${`chip ${tone ?? TONES[children] ?? ""}`}>${String(children).replaceAll("_", " ")}</span>`;
}

export function Figure({ label, value, unit, hint }) {
  return html`
    <div class="figure">
      <dt>${label}</dt>
      <dd>${value}${unit && html`<small> ${unit}</small>`}${hint && html`<span class="muted hint">${hint}</span>`}</dd>
    </div>
  `;
}

export const Figures = ({ children }) => html`<dl class="figures">${children}</dl>`;

const kindOf = (column) => (column.numeric ? "num" : column.wide ? "wide-cell" : "");

/** Columns: [{name, value: row => …, numeric, wide}]. Rows need an id, or `keyOf`. `narrow`: names and numbers that
 *  belong together stay together. */
export function Table({ label, columns, rows, keyOf = (row) => row.id, selected, empty, narrow = false }) {
  if (!rows.length && empty) return empty;
  return html`
    <div class=${`table-wrap ${narrow ? "narrow" : ""}`} tabindex="0" role="group" aria-label=${label}>
      <table>
        <thead>
          <tr>
            ${columns.map((column) => html`<th scope="col" class=${kindOf(column)}>${column.name || html`<span class="visually-hidden">${column.hidden}</span>`}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${rows.map(
            (row) => html`
              <tr key=${keyOf(row)} class=${selected === keyOf(row) ? "selected" : ""}>
                ${columns.map((column) => html`<td class=${kindOf(column)}>${column.value(row)}</td>`)}
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}

/** Button below the table of a list (useList) of which there is more. */
export const More = ({ of }) => of.data?.more && html`<div><button disabled=${of.loading} onClick=${of.showMore}>Show more than ${number(of.data.data.length)}</button></div>`;

/** A bar of shares: parts are [{name, value, text}] in the order in which they stand. */
export function StackedBar({ parts, total, label }) {
  const shown = parts.filter((part) => part.value > 0);
  return html`
    <div class="stack" role="img" aria-label=${`${label}: ${shown.map((part) => `${part.name} ${part.text}`).join(", ")}`}>
      ${shown.map((part, index) => html`<span key=${part.name} class=${`tone-${part.tone ?? index % 9}`} style=${{ flexGrow: part.value / total, flexBasis: "0" }} title=${`${part.name}: ${part.text}`}></span>`)}
    </div>
    <ul class="legend">
      ${shown.map((part, index) => html`<li key=${part.name}><i class=${`swatch tone-${part.tone ?? index % 9}`}></i>${part.name}<b>${part.text}</b></li>`)}
    </ul>
  `;
}

export function Progress({ value, total, label }) {
  const share = total ? value / total : 0;
  return html`
    <div class="progress" role="progressbar" aria-label=${label} aria-valuenow=${Math.round(share * 100)} aria-valuemin="0" aria-valuemax="100">
      <span style=${{ width: `${Math.min(100, share * 100)}%` }}></span>
    </div>
  `;
}

export const Steps = ({ progress }) =>
  progress?.total_steps ? html`<span>${number(progress.step)} / ${number(progress.total_steps)}</span>` : html`<span class="muted">–</span>`;

/** An interval of a score on [low, high], with its middle. `label` says it in words where it is no share. */
export function Interval({ low, high, middle, from = 0, to = 1, label = `${percent(middle, 1)}, 95 % interval ${percent(low, 1)} to ${percent(high, 1)}` }) {
  const place = (value) => `${(100 * (Math.min(Math.max(value, from), to) - from)) / (to - from)}%`;
  return html`
    <span class="interval" role="img" aria-label=${label}>
      ${from < 0 && html`<i class="zero" style=${{ left: place(0) }}></i>`}
      <i class="range" style=${{ left: place(low), width: `calc(${place(high)} - ${place(low)})` }}></i>
      <i class="middle" style=${{ left: place(middle) }}></i>
    </span>
  `;
}

/** Tabs of one page: [{id, name}]; arrow keys move between them. */
export function Tabs({ tabs, chosen, choose, label }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const index = tabs.findIndex((tab) => tab.id === chosen);
    const next = tabs[(index + step + tabs.length) % tabs.length];
    choose(next.id);
    event.currentTarget.querySelector(`[data-tab="${next.id}"]`)?.focus();
  };
  return html`
    <div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
      ${tabs.map((tab) => html`<button role="tab" data-tab=${tab.id} aria-selected=${tab.id === chosen} tabindex=${tab.id === chosen ? 0 : -1} onClick=${() => choose(tab.id)}>${tab.name}</button>`)}
    </div>
  `;
}

export function Copy({ text, children = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button class="quiet" onClick=${copy}>${done ? "Copied" : children}</button>`;
}
