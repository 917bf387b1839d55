// Learning: learners with their cycles, and canaries, whose arms stand beside each other.

import { html } from "../vendor/htm-preact.js";
import { get, post } from "../core/api.js";
import { ago, moment, number, percent, plural, shortId } from "../core/format.js";
import { link, useList, useLoaded, useMay, usePolled } from "../core/hooks.js";
import { Card, Chip, Empty, Figure, Figures, Loaded, More, Page, Table } from "../parts/basics.js";
import { CanaryPage } from "../parts/canary.js";
import { attempt, confirmed } from "../parts/dialogs.js";

const TONES = {
  promoted: "good", collecting: "good",
  preparing: "busy", data: "busy", training: "busy", evaluating: "busy", canary: "busy", promoting: "busy",
  rejected: "bad", rolled_back: "bad", failed: "bad", stopped: "bad",
};
const pathOf = (name) => `/v1/learners/${encodeURIComponent(name)}`;
const state = (name) => html`<${Chip} tone=${TONES[name]}>${name}<//>`;
const signed = (share) => `${share >= 0 ? "+" : ""}${percent(share, 1)}`;
const canaryLink = (id) => html`<a href=${link("learning", "canaries", id)} title=${id}>${shortId(id)}</a>`;

function Learners() {
  const learners = useList("/v1/learners", {}, 3);
  const columns = [
    { name: "Learner", wide: true, value: (one) => html`<a href=${link("learning", one.id)}>${one.id}</a>` },
    { name: "Adapter", wide: true, value: (one) => html`<a href=${link("adapters", one.policy.adapter)}>${one.policy.adapter}</a>` },
    { name: "State", value: (one) => state(one.state) },
    { name: "Cycle", numeric: true, value: (one) => number(one.cycle) },
    { name: "Its end", value: (one) => (one.outcome ? state(one.outcome) : "–") },
    { name: "Promoted last", value: (one) => one.promoted ?? "–" },
    { name: "Since", value: (one) => ago(one.entered_at) },
  ];
  return html`
    <${Card} wide title="Learners">
      <${Loaded} state=${learners} empty=${(found) => !found.data.length && html`<${Empty} title="No learner yet">A learner trains an adapter on what users say of its answers, by rules in a file: <code>temper learner apply FILE.yaml</code>.<//>`}>
        ${(found) => html`<${Table} label="Learners" columns=${columns} rows=${found.data} /><${More} of=${learners} />`}
      <//>
    <//>
  `;
}

function Canaries() {
  const canaries = useList("/v1/canaries", {}, 3);
  const columns = [
    { name: "Canary", wide: true, value: (one) => canaryLink(one.id) },
    { name: "Candidate", wide: true, value: (one) => one.candidate },
    { name: "Compared with", wide: true, value: (one) => one.current },
    { name: "State", value: (one) => state(one.state) },
    { name: "Share", numeric: true, value: (one) => percent(one.policy.share) },
    { name: "Answers", numeric: true, value: (one) => number(one.evidence?.candidate.answers ?? 0) },
    { name: "Effect", numeric: true, value: (one) => number(one.evidence?.look.effect) },
    { name: "Why", wide: true, value: (one) => one.decision?.detail ?? "–" },
    { name: "Began", value: (one) => ago(one.began_at) },
  ];
  return html`
    <${Card} wide title="Canaries">
      <${Loaded} state=${canaries} empty=${(found) => !found.data.length && html`<${Empty} title="No canary yet">A canary lets a version answer a share of the traffic until it is shown to be better: <code>temper canary start NAME@N</code>.<//>`}>
        ${(found) => html`<${Table} label="Canaries" columns=${columns} rows=${found.data} /><${More} of=${canaries} />`}
      <//>
    <//>
  `;
}

/** Where an event's evidence leads, and its numbers in a few words. */
function Evidence({ event }) {
  const { dataset, rows, job, canary, candidate, gates, waiting } = event.evidence;
  const told = [
    waiting !== undefined && plural(waiting, "new row"),
    dataset && html`data set <code>${dataset}</code>`,
    rows && Object.entries(rows).map(([split, count]) => `${split.replaceAll("_", "-")} ${number(count)}`).join(", "),
    job && html`<a href=${link("jobs", job)}>job</a>`,
    candidate && html`version <code>${candidate}</code>`,
    canary && html`<a href=${link("learning", "canaries", canary)}>canary</a>`,
    ...(gates ?? []).flatMap(gateLines),
  ].filter(Boolean);
  return told.length > 0 && html`<p class="muted">${told.map((one, index) => html`${index > 0 && " · "}${one}`)}</p>`;
}

/** Conditions of a gate: the gain that was seen on each suite, with its interval, and how far the version is from the one before. */
const gateLines = (gate) => [
  ...gate.conditions.map(({ suite, gain, interval: [low, high], passed }) => `${suite} ${signed(gain)} (${signed(low)} to ${signed(high)})${passed ? "" : ", which is not enough"}`),
  ...(gate.divergence ? [divergenceLine(gate.divergence)] : []),
];

const divergenceLine = ({ kl, interval: [low, high], max_kl: most, passed }) => `KL ${number(kl)} a token (${number(low)} to ${number(high)})${passed ? "" : `, over ${number(most)}`}`;

function Timeline({ events }) {
  return html`
    <ol class="timeline" aria-label="What happened, newest first">
      ${events.map((event) => html`
        <li key=${event.id} class=${TONES[event.kind] ?? ""}>
          <div class="row"><${Chip} tone=${TONES[event.kind]}>${event.kind}<//><span class="muted">cycle ${event.cycle} · <time>${moment(event.at)}</time>${event.by !== "controller" && html` · by <code>${event.by}</code>`}</span></div>
          <p>${event.detail}</p>
          <${Evidence} event=${event} />
        </li>
      `)}
    </ol>
  `;
}

/** The data set that taught the last candidate: how many rows of what, and what was left out. */
function Taught({ name }) {
  const dataset = useLoaded(() => get(`/v1/datasets/${encodeURIComponent(name)}`), [name]);
  return html`
    <${Card} title=${`Data set ${name}`}>
      <${Loaded} state=${dataset}>
        ${(found) => html`
          <${Figures}>
            ${Object.entries(found.rows).map(([split, count]) => html`<${Figure} key=${split} label=${split.replaceAll("_", "-")} value=${number(count)} unit="rows" />`)}
            ${Object.entries(found.report).filter(([, value]) => typeof value === "number" && value > 0).map(([what, value]) => html`<${Figure} key=${what} label=${what.replaceAll("_", " ")} value=${number(value)} />`)}
          <//>
          ${found.report.top_users?.length > 0 && html`<p class="muted">Users with the most rows: ${found.report.top_users.map((one) => `${one.user} ${number(one.rows)}`).join(", ")}</p>`}
          ${found.report.outliers?.length > 0 && html`<${Outliers} users=${found.report.outliers} />`}
        `}
      <//>
    <//>
  `;
}

/** Users whose feedback is unlike that of the rest, with robust z scores. */
function Outliers({ users }) {
  const columns = [
    { name: "User unlike the rest", value: (one) => html`<code>${one.user}</code>` },
    { name: "Opinions", numeric: true, value: (one) => number(one.opinions) },
    { name: "Mean score", numeric: true, value: (one) => `${number(one.score)} (z ${number(one.score_z)})` },
    { name: "Agreement", numeric: true, value: (one) => one.agreement === null ? "–" : `${percent(one.agreement)} (z ${number(one.agreement_z)})` },
  ];
  return html`<${Table} label="Users unlike the rest" narrow columns=${columns} rows=${users} keyOf=${(one) => one.user} />`;
}

function Plan({ name }) {
  const plan = useLoaded(() => get(`${pathOf(name)}/plan`), [name]);
  return html`
    <${Card} title="The next cycle" actions=${html`<button onClick=${plan.reload} disabled=${plan.loading}>Look again</button>`}>
      <${Loaded} state=${plan}>
        ${(found) => html`
          <p>${found.begins ? "It begins now" : "It waits"}: ${found.why}.</p>
          <${Figures}>
            <${Figure} label="New rows" value=${number(found.waiting)} />
            <${Figure} label="Examples to learn from" value=${number(found.examples)} />
            <${Figure} label="Share in a canary" value=${found.canary_share === null ? "none" : percent(found.canary_share)} />
          <//>
          ${found.suites.length > 0 && html`<p class="muted">Gate: ${found.suites.join(", ")}</p>`}
          ${found.problems.length > 0 && html`<ul class="failure">${found.problems.map((problem) => html`<li key=${problem}>${problem}</li>`)}</ul>`}
        `}
      <//>
    <//>
  `;
}

function Learner({ name }) {
  const mayTrain = useMay("train");
  const learner = usePolled(() => get(pathOf(name), {}, { quiet: true }), 2, [name]);
  const events = useList(`${pathOf(name)}/events`, {}, 2);
  const change = async (what, done) => {
    await attempt(() => post(`${pathOf(name)}/${what}`), done);
    learner.reload();
    events.reload();
  };
  const pause = async () => {
    const agreed = await confirmed({ title: `Pause ${name}?`, body: html`<p>It begins no further step until it is resumed. A job or a canary that runs goes on.</p>`, action: "Pause it", danger: false });
    if (agreed) await change("pause", `${name} is paused.`);
  };
  const actions = (found) => html`
    ${["paused", "stopped"].includes(found.state)
      ? html`<button class="primary" onClick=${() => change("resume", `${name} goes on.`)}>Resume</button>`
      : html`<button onClick=${pause}>Pause</button>`}
    ${mayTrain && found.state === "collecting" && html`<button onClick=${() => change("run", "A cycle begins.")}>Begin a cycle now</button>`}
  `;
  return html`
    <${Loaded} state=${learner}>
      ${(found) => html`
        <${Page} title=${name} note=${`Trains ${found.policy.adapter} by ${found.policy.method}, by policy ${found.revision}.`} actions=${actions(found)}>
          <${Figures}>
            <${Figure} label="State" value=${state(found.state)} hint=${`since ${moment(found.entered_at)}`} />
            <${Figure} label="Cycle" value=${number(found.cycle)} hint=${found.outcome ? `ended ${found.outcome.replaceAll("_", " ")}` : ""} />
            <${Figure} label="Promoted last" value=${found.promoted ?? "none"} />
            <${Figure} label="Refused in a row" value=${`${found.refused} of ${found.policy.stop_after}`} hint="at the last it stops" />
            ${found.canary && html`<${Figure} label="Canary" value=${canaryLink(found.canary)} />`}
            ${found.job && html`<${Figure} label="Job" value=${html`<a href=${link("jobs", found.job)} title=${found.job}>${shortId(found.job)}</a>`} />`}
          <//>
          <div class="grid">
            <${Plan} name=${name} />
            ${found.dataset && html`<${Taught} name=${found.dataset} />`}
          </div>
          <${Card} wide title="Timeline">
            <${Loaded} state=${events}>${(page) => html`<${Timeline} events=${page.data} /><${More} of=${events} />`}<//>
          <//>
        <//>
      `}
    <//>
  `;
}

export default function Learning({ parts }) {
  if (parts[0] === "canaries" && parts[1]) return html`<${CanaryPage} id=${parts[1]} key=${parts[1]} />`;
  if (parts[0] && parts[0] !== "canaries") return html`<${Learner} name=${parts[0]} key=${parts[0]} />`;
  return html`
    <${Page} title="Learning" note="What users say of answers becomes data, the data a version, and a version is promoted once it has shown that it is better.">
      <${Learners} />
      <${Canaries} />
    <//>
  `;
}
