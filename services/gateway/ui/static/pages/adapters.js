// Adapters: each one's versions as a tree of what came of what, their numbers, and what can be done with them.

import { html, useState } from "../vendor/htm-preact.js";
import { allVersions, listAdapters, pathOf, versionsOf } from "../core/adapters.js";
import { get, list, post, remove, save } from "../core/api.js";
import { bytes, moment, number, percent, plural, spoken } from "../core/format.js";
import { go, link, useLoaded, useMay } from "../core/hooks.js";
import { Card, Chip, Empty, Failure, Figure, Figures, Interval, Loaded, Page, Table } from "../parts/basics.js";
import { attempt, confirmed } from "../parts/dialogs.js";
import { TextField } from "../parts/form.js";

const OPEN_JOBS = 1000;
const MANY = 12;

/** All adapters, and the versions of the one that is looked at; null: there is none of this name. */
async function load(name) {
  const { data: adapters, attached } = await listAdapters();
  const chosen = name ?? adapters[0]?.name;
  const versions = adapters.some((one) => one.name === chosen) ? await versionsOf(chosen) : null;
  return { adapters, attached, chosen, versions };
}

const parentOf = (version) => version.parent ?? null;

/** Versions as trees: those whose parent is not among them are roots. */
function treesOf(versions) {
  const nodes = new Map(versions.map((version) => [version.id, { version, children: [] }]));
  const roots = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(parentOf(node.version));
    (parent ? parent.children : roots).push(node);
  }
  return roots;
}

function Node({ node, chosen, choose }) {
  const { version, children } = node;
  const outside = parentOf(version) && version.parent.split("@")[0] !== version.name;
  return html`
    <li>
      <button class="node" aria-pressed=${version.id === chosen} onClick=${() => choose(version.id)}>
        <strong>${version.id}</strong>
        ${version.kind === "drafter" && html`<${Chip}>drafter<//>`}${version.attached && html`<${Chip}>attached<//>`}${version.current && html`<${Chip}>current<//>`}
        <span class="muted">${outside ? `from ${version.parent} · ` : ""}${version.metrics.loss === undefined ? "" : `loss ${number(version.metrics.loss)} · `}${moment(version.created_at)}</span>
      </button>
      ${children.length > 0 && html`<ul class="tree">${children.map((child) => html`<${Node} key=${child.version.id} node=${child} chosen=${chosen} choose=${choose} />`)}</ul>`}
    </li>
  `;
}

/** What stops working, or changes, when an adapter is deleted. */
async function consequences(name, found) {
  const open = (state) => list("/v1/train/jobs", { state }, OPEN_JOBS).catch(() => ({ data: [] }));
  const [all, queued, running] = await Promise.all([allVersions(found.adapters), open("queued"), open("running")]);
  const versions = all.filter((version) => version.name === name);
  const children = all.filter((version) => version.name !== name && version.parent?.startsWith(`${name}@`));
  const jobs = [...running.data, ...queued.data].filter((job) => job.adapter === name || job.parent?.startsWith(`${name}@`));
  const lines = [
    `${plural(versions.length, "version")} (${bytes(versions.reduce((sum, one) => sum + one.size_bytes, 0))}) ${versions.length === 1 ? "is" : "are"} removed from the object store.`,
    `Requests for ${name} and ${name}@n get an error from then on.`,
  ];
  if (found.attached?.startsWith(`${name}@`)) lines.push(`${found.attached} is attached: Temper refuses to delete it until it is detached.`);
  if (jobs.length) lines.push(`${plural(jobs.length, "job")} that have not ended need it: ${jobs.map((job) => job.id).join(", ")}.`);
  if (children.length) lines.push(`Versions that came of it stay, and lose where they came from: ${children.map((one) => one.id).join(", ")}.`);
  return lines;
}

function useActions(found, reload) {
  const sure = async (question, path, body, done) => {
    if (!(await confirmed(question))) return;
    await attempt(() => post(path, body), done);
    reload();
  };
  return {
    attach: (version) =>
      sure({ title: `Attach ${version.id}?`, body: html`<p>Every request for the base model's name is answered by ${version.id} from now on${found.attached ? `, and no longer by ${found.attached}` : ""}. Requests that run keep their version.</p>`, action: "Attach", danger: false }, `${pathOf(version.name)}/attach`, { version: version.version }, `${version.id} is attached.`),
    detach: (name) =>
      sure({ title: `Detach ${found.attached}?`, body: html`<p>Requests for the base model's name are answered by the base model again. ${found.attached} can still be asked by its name.</p>`, action: "Detach" }, `${pathOf(name)}/detach`, {}, "The base model answers again."),
    rollback: (name) => {
      const { versions } = found;
      const current = versions.find((one) => one.current);
      const earlier = versions.filter((one) => one.version < (current?.version ?? 0)).at(-1);
      return sure({ title: `Roll ${name} back?`, body: html`<p>${earlier ? earlier.id : "An earlier version"} becomes current in the place of ${current?.id}${found.attached === current?.id ? ", and is attached in its place" : ""}. Nothing is deleted.</p>`, action: "Roll back" }, `${pathOf(name)}/rollback`, {}, (answer) => `${answer.version ?? earlier?.id ?? name} is current again.`);
    },
    remove: async (name) => {
      const lines = await attempt(() => consequences(name, found));
      if (lines === undefined) return;
      const body = html`<p>This cannot be taken back.</p><ul>${lines.map((text) => html`<li key=${text}>${text}</li>`)}</ul>`;
      if (!(await confirmed({ title: `Delete ${name}?`, body, action: "Delete all versions", word: name }))) return;
      const done = await attempt(() => remove(pathOf(name)), `${name} is deleted.`);
      if (done) go("adapters");
      reload();
    },
  };
}

function Evaluations({ version }) {
  const runs = useLoaded(() => get(`${pathOf(version.name)}/versions/${version.version}/evaluations`), [version.id]);
  const rows = (found) =>
    found.data.flatMap((run) => (run.summaries ?? []).filter((one) => one.target === version.id).map((one) => ({ ...one, id: `${run.id}/${one.suite}`, run: run.id })));
  const columns = [
    { name: "Suite", value: (row) => html`<a href=${link("evaluations", row.run)}>${row.suite}</a>` },
    { name: "Score", numeric: true, value: (row) => percent(row.mean, 1) },
    { name: "95 % interval", value: (row) => html`<${Interval} low=${row.interval.low} high=${row.interval.high} middle=${row.mean} />` },
  ];
  return html`
    <h3>Evaluations</h3>
    <${Loaded} state=${runs} empty=${(found) => !rows(found).length && html`<p class="muted">None yet. <a href=${`#/evaluations?target=${encodeURIComponent(version.id)}`}>Run a suite</a> on it.</p>`}>
      ${(found) => html`<${Table} label="Evaluations of the version" columns=${columns} rows=${rows(found)} />`}
    <//>
  `;
}

function Version({ version, found, actions }) {
  const mayAttach = useMay("attach", "admin");
  const mayDownload = useMay("train", "admin");
  const mayRuns = useMay("train", "admin");
  const metrics = Object.entries(version.metrics).filter(([name]) => !name.endsWith("seconds"));
  const download = () => attempt(() => save(`${pathOf(version.name)}/download`, `${version.id}.tar.gz`, { version: version.version }));
  const answers = version.kind !== "drafter";
  const buttons = html`
    ${answers && html`<a class="button" href=${`#/chat?model=${encodeURIComponent(version.id)}&beside=${encodeURIComponent(version.parent ?? "base")}`}>Compare in the chat</a>`}
    ${answers && mayAttach && (version.attached ? html`<button onClick=${() => actions.detach(version.name)}>Detach</button>` : html`<button onClick=${() => actions.attach(version)}>Attach</button>`)}
    ${mayDownload && html`<button onClick=${download}>Download</button>`}
  `;
  return html`
    <${Card} title=${version.id} actions=${buttons}>
      <${Figures}>
        ${answers && html`<${Figure} label="Rank" value=${version.rank} />`}
        <${Figure} label="Size" value=${bytes(version.size_bytes)} />
        <${Figure} label="Made" value=${moment(version.created_at)} />
        <${Figure} label="From" value=${version.parent ?? "the base"} />
        <${Figure} label="By" value=${version.job_id ? (mayRuns ? html`<a href=${link("jobs", version.job_id)}>its job</a>` : version.job_id) : "upload"} />
      <//>
      ${version.gates?.length > 0 && html`<h3>Gates</h3><ul>${version.gates.map((gate, index) => html`<li key=${index}><${Chip} tone=${gate.passed ? "good" : "bad"}>${gate.passed ? "passed" : "not passed"}<//> ${gate.suite ?? gate.condition ?? ""} ${gate.message ?? ""}</li>`)}</ul>`}
      ${metrics.length > 0 && html`<h3>Metrics of its last step</h3><${Table} narrow label="Metrics" columns=${[{ name: "Metric", value: ([name]) => spoken(name) }, { name: "Value", numeric: true, value: ([, value]) => number(value) }]} keyOf=${([name]) => name} rows=${metrics} />`}
      ${mayRuns && html`<${Evaluations} version=${version} />`}
      <h3>Digest</h3><code>${version.digest}</code>
    <//>
  `;
}

function Adapter({ name, found, reload }) {
  const { versions } = found;
  const [chosen, setChosen] = useState(versions.find((one) => one.current)?.id ?? versions.at(-1)?.id);
  const actions = useActions(found, reload);
  const mayAttach = useMay("attach", "admin");
  const mayAdmin = useMay("admin");
  const version = versions.find((one) => one.id === chosen) ?? versions.at(-1);
  const buttons = html`
    ${mayAttach && html`<button disabled=${versions.length < 2} onClick=${() => actions.rollback(name)}>Roll back</button>`}
    ${mayAdmin && html`<button class="danger" onClick=${() => actions.remove(name)}>Delete</button>`}
  `;
  return html`
    <div class="halves">
      <${Card} title=${name} actions=${buttons}>
        <ul class="tree" aria-label=${`Versions of ${name} by lineage`}>
          ${treesOf(versions).map((node) => html`<${Node} key=${node.version.id} node=${node} chosen=${version?.id} choose=${setChosen} />`)}
        </ul>
      <//>
      ${version && html`<${Version} version=${version} found=${found} actions=${actions} />`}
    </div>
  `;
}

function Names({ found }) {
  const [wanted, setWanted] = useState("");
  const { adapters } = found;
  const many = adapters.length > MANY;
  const shown = adapters.filter((one) => one.name.includes(wanted));
  return html`
    <div class="stacked">
      ${many && html`<div class="fields filter"><${TextField} label=${`Find one of ${number(adapters.length)} adapters`} value=${wanted} change=${setWanted} placeholder="a part of its name" /></div>`}
      <nav class=${`row ${many ? "many" : ""}`} aria-label="Adapters">
        ${shown.map((one) => html`<a key=${one.name} class="button" aria-current=${one.name === found.chosen ? "true" : undefined} href=${link("adapters", one.name)}>${one.name} <span class="muted">${one.current ? `@${one.current}` : "–"}</span></a>`)}
        ${!shown.length && html`<span class="muted">No adapter is called like this.</span>`}
      </nav>
    </div>
  `;
}

export default function Adapters({ parts: [name] }) {
  const loaded = useLoaded(() => load(name), [name]);
  const nothing = html`<${Empty} title="No adapter yet">One is made by a <a href="#/jobs/new">job</a>, or by <code>temper adapters push</code>.<//>`;
  return html`
    <${Page} title="Adapters" note=${loaded.data && (loaded.data.attached ? `${loaded.data.attached} answers for the base model's name.` : "The base model answers for its own name.")} actions=${html`<button onClick=${loaded.reload}>Refresh</button>`}>
      <${Loaded} state=${loaded} empty=${(found) => !found.adapters.length && nothing}>
        ${(found) => html`
          ${found.adapters.length > 1 && html`<${Names} found=${found} />`}
          ${found.versions ? html`<${Adapter} key=${found.chosen} name=${found.chosen} found=${found} reload=${loaded.reload} />` : html`<${Failure} error=${{ message: `There is no adapter ${found.chosen}.` }} />`}
        `}
      <//>
    <//>
  `;
}
