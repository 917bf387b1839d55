// Jobs: all of them, and one or several with their curves, settings and log.

import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { get, post } from "../core/api.js";
import { ago, duration, moment, number, shortId, spoken } from "../core/format.js";
import { link, useList, useMay, usePolled } from "../core/hooks.js";
import { curves, hasEnded, metricNames, useJobEvents } from "../core/job_events.js";
import { Card, Chip, Empty, Figure, Figures, Loaded, More, Page, Progress, Steps, Table } from "../parts/basics.js";
import { attempt, confirmed } from "../parts/dialogs.js";
import { EventLog } from "../parts/event_log.js";
import { Select, TextField } from "../parts/form.js";
import { JobForm } from "../parts/job_form.js";
import { Plot } from "../parts/plot.js";

const STATES = [["", "every state"], "queued", "running", "succeeded", "failed", "cancelled"];
const SHOWN = 4;
const nameOf = (job) => job.adapter || (job.kind === "eval" ? "evaluation" : job.kind);
const step = (value) => (Number.isInteger(value) ? String(value) : "");

async function cancel(job, reload) {
  const agreed = await confirmed({
    title: `Cancel the job on ${nameOf(job)}?`,
    body: html`<p>${job.state === "queued" ? "It is taken out of the queue." : "It stops at its next step, and no version is made of what it has learnt so far."} This cannot be taken back.</p>`,
    action: "Cancel the job",
  });
  if (!agreed) return;
  await attempt(() => post(`/v1/train/jobs/${job.id}/cancel`), "The job is being cancelled.");
  reload();
}

const stateOf = (job) => (job.state === "queued" && job.paused ? "paused" : job.state);

async function pauseOrResume(job, reload) {
  const told = job.paused ? "The job goes on when its turn comes." : "The job pauses at its next step.";
  await attempt(() => post(`/v1/train/jobs/${job.id}/${job.paused ? "resume" : "pause"}`), told);
  reload();
}

function PauseButton({ job, reload }) {
  if (hasEnded(job) || job.cancel_requested) return null;
  const pausing = job.paused && job.state === "running";
  return html`<button disabled=${pausing} onClick=${() => pauseOrResume(job, reload)}>${pausing ? "Pausing …" : job.paused ? "Resume" : "Pause"}</button>`;
}

function Curves({ known, jobs }) {
  const ids = jobs.map((job) => job.id);
  const names = metricNames(known);
  const [more, setMore] = useState(false);
  const shown = more ? names : names.slice(0, SHOWN);
  if (!names.length) {
    const started = jobs.some((job) => job.started_at);
    return html`<${Empty} title=${started ? "No step has ended yet" : "No job has started yet"}>The curves appear with the first step.<//>`;
  }
  const label = (job) => (jobs.length === 1 ? nameOf(job) : `${nameOf(job)} ${job.id.slice(-4)}`);
  return html`
    <div class="grid">
      ${shown.map((name) => html`<${Curve} key=${name} name=${name} known=${known} ids=${ids} labels=${jobs.map(label)} />`)}
    </div>
    ${names.length > SHOWN && html`<div><button onClick=${() => setMore(!more)}>${more ? "Fewer curves" : `All ${names.length} curves`}</button></div>`}
  `;
}

function Curve({ name, known, ids, labels }) {
  const data = useMemo(() => curves(known, ids, name), [known, ids.join(), name]);
  const ends = ids.map((id, index) => `${labels[index]} ${number(known[id]?.points.at(-1)?.[name])}`).join(", ");
  const single = data[0].length < 60;
  return html`
    <${Card} title=${spoken(name)}>
      <${Plot} data=${data} unit="step" xFormat=${step} format=${number} summary=${`${spoken(name)} by step; at the end: ${ends}`} series=${labels.map((label, tone) => ({ label, tone, spanGaps: true, points: single }))} />
    <//>
  `;
}

function flattened(value, prefix = "", found = {}) {
  for (const [name, inner] of Object.entries(value ?? {})) {
    const path = prefix ? `${prefix}.${name}` : name;
    if (inner !== null && typeof inner === "object" && !Array.isArray(inner)) flattened(inner, path, found);
    else found[path] = Array.isArray(inner) ? JSON.stringify(inner) : inner;
  }
  return found;
}

function Settings({ jobs }) {
  const [onlyDifferent, setOnly] = useState(false);
  const tables = jobs.map((job) => flattened({ method: job.kind, ...job.settings, start_from: job.parent, ...job.metadata }));
  const names = [...new Set(tables.flatMap(Object.keys))];
  const differs = (name) => new Set(tables.map((table) => JSON.stringify(table[name] ?? null))).size > 1;
  const rows = names.filter((name) => !onlyDifferent || differs(name)).map((name) => ({ id: name }));
  const columns = [
    { name: "Setting", value: (row) => html`<span class=${differs(row.id) ? "strong" : ""}>${spoken(row.id)}</span>` },
    ...jobs.map((job, index) => ({ name: jobs.length > 1 ? `${nameOf(job)} ${job.id.slice(-4)}` : "Value", value: (row) => show(tables[index][row.id]) })),
  ];
  return html`
    <${Card} wide title="Settings" actions=${jobs.length > 1 && html`<button aria-pressed=${onlyDifferent} onClick=${() => setOnly(!onlyDifferent)}>Only what differs</button>`}>
      <${Table} label="Settings" columns=${columns} rows=${rows} empty=${html`<${Empty} title=${onlyDifferent ? "Nothing differs" : "The trainer has not said yet"}>Settings are known when a job begins.<//>`} />
    <//>
  `;
}

const show = (value) => (typeof value === "number" ? number(value) : value === null || value === undefined ? "–" : String(value));

function Summary({ job, reload }) {
  const actions = html`
    <${PauseButton} job=${job} reload=${reload} />
    ${!hasEnded(job) && html`<button class="danger" disabled=${job.cancel_requested} onClick=${() => cancel(job, reload)}>${job.cancel_requested ? "Cancelling …" : "Cancel"}</button>`}
    ${job.result_adapter && html`<a class="button" href=${`#/chat?model=${encodeURIComponent(job.result_adapter)}&beside=${encodeURIComponent(job.parent ?? "base")}`}>Compare in the chat</a>`}
  `;
  return html`
    <${Card} title=${`${nameOf(job)} · ${job.kind}`} actions=${actions}><div class="stacked">
      <div class="row"><${Chip}>${stateOf(job)}<//><code title=${job.id}>${job.id}</code></div>
      ${job.reason && html`<p class=${job.state === "failed" ? "failure" : "note"}>${job.reason}</p>`}
      ${job.state === "running" && html`<div class="row"><${Progress} value=${job.progress.step} total=${job.progress.total_steps} label="Steps" /><${Steps} progress=${job.progress} /></div>`}
      <${Figures}>
        <${Figure} label="Step" value=${html`<${Steps} progress=${job.progress} />`} />
        <${Figure} label="Loss" value=${number(job.metrics.loss)} />
        <${Figure} label="Submitted" value=${moment(job.created_at)} />
        <${Figure} label=${job.finished_at ? "Took" : "Left"} value=${duration(job.finished_at ? job.finished_at - (job.started_at ?? job.created_at) : job.progress.eta_seconds)} />
        <${Figure} label="Made" value=${job.result_adapter ? html`<a href=${link("adapters", job.adapter)}>${job.result_adapter}</a>` : "–"} />
      <//>
      ${job.notes.map((note) => html`<p class="note" key=${note}>${note}</p>`)}
    </div><//>
  `;
}

function Details({ ids }) {
  const known = useJobEvents(ids);
  const open = ids.some((id) => !known[id]?.ended);
  const jobs = usePolled(() => Promise.all(ids.map((id) => get(`/v1/train/jobs/${id}`, {}, { quiet: true }))), open ? 1 : 0, [ids.join(), open]);
  const log = ids.flatMap((id) => (known[id]?.log ?? []).map((event) => ({ ...event, id: `${id}/${event.id}` }))).sort((a, b) => a.time - b.time);
  return html`
    <${Page} title=${ids.length > 1 ? `${ids.length} jobs` : "Job"} actions=${html`<a class="button" href="#/jobs">All jobs</a>`}>
      <${Loaded} state=${jobs}>
        ${(found) => html`
          <div class=${found.length > 1 ? "grid" : "stacked"}>${found.map((job) => html`<${Summary} key=${job.id} job=${job} reload=${jobs.reload} />`)}</div>
          <${Curves} known=${known} jobs=${found} />
          <${Card} wide title="Log"><${EventLog} label="Log of the job" events=${log} /><//>
          <${Settings} jobs=${found} />
        `}
      <//>
    <//>
  `;
}

function List() {
  const [state, setState] = useState("");
  const [adapter, setAdapter] = useState("");
  const [chosen, setChosen] = useState([]);
  const mayTrain = useMay("train");
  const jobs = useList("/v1/train/jobs", { state, adapter }, 2);
  const choose = (id) => setChosen(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  const columns = [
    { name: "", hidden: "Compare", value: (job) => html`<input type="checkbox" aria-label=${`Compare ${nameOf(job)} ${job.id}`} checked=${chosen.includes(job.id)} onChange=${() => choose(job.id)} />` },
    { name: "Job", wide: true, value: (job) => html`<a href=${link("jobs", job.id)}>${nameOf(job)}</a> <span class="muted">${shortId(job.id)}</span>` },
    { name: "Method", value: (job) => job.kind },
    { name: "State", value: (job) => html`<${Chip}>${stateOf(job)}<//>` },
    { name: "Step", numeric: true, value: (job) => html`<${Steps} progress=${job.progress} />` },
    { name: "Loss", numeric: true, value: (job) => number(job.metrics.loss) },
    { name: "Submitted", value: (job) => ago(job.created_at) },
    { name: "Made", wide: true, value: (job) => job.result_adapter ?? "–" },
    { name: "Key", value: (job) => job.key_id ?? "–" },
    { name: "", hidden: "Actions", value: (job) => !hasEnded(job) && html`<button class="quiet" onClick=${() => cancel(job, jobs.reload)}>Cancel</button>` },
  ];
  const actions = html`
    <a class=${`button ${chosen.length < 2 ? "off" : ""}`} aria-disabled=${chosen.length < 2} href=${chosen.length < 2 ? undefined : link("jobs", chosen.join("+"))}>Compare ${chosen.length > 1 ? chosen.length : "several"}</a>
    ${mayTrain && html`<a class="button primary" href="#/jobs/new">New job</a>`}
  `;
  const nothing = html`<${Empty} title=${state || adapter ? "No job is like this" : "No job yet"}>${mayTrain ? html`<a href="#/jobs/new">Submit one</a>, or collect examples in the <a href="#/chat">chat</a>.` : "Your key sees its own jobs."}<//>`;
  return html`
    <${Page} title="Jobs" actions=${actions}>
      <${Card}>
        <div class="fields filter"><${Select} label="State" value=${state} change=${setState} options=${STATES} /><${TextField} label="Adapter" value=${adapter} change=${setAdapter} placeholder="every adapter" /></div>
        <${Loaded} state=${jobs} empty=${(found) => !found.data.length && nothing}>${(found) => html`<${Table} label="Jobs" columns=${columns} rows=${found.data} /><${More} of=${jobs} />`}<//>
      <//>
    <//>
  `;
}

export default function Jobs({ parts: [which] }) {
  if (which === "new") return html`<${JobForm} />`;
  return which ? html`<${Details} key=${which} ids=${which.split("+")} />` : html`<${List} />`;
}
