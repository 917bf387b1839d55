// A canary: its two arms beside each other, the test that decides between them, and its guardrails.

import { html } from "../vendor/htm-preact.js";
import { get, post } from "../core/api.js";
import { duration, moment, number, percent, plural } from "../core/format.js";
import { link, useMay, usePolled } from "../core/hooks.js";
import { Card, Chip, Empty, Figure, Figures, Interval, Loaded, Page, Progress, Table } from "./basics.js";
import { attempt, confirmed } from "./dialogs.js";

const TONES = { running: "busy", promoting: "busy", promoted: "good", rolled_back: "bad", superseded: "" };
const ratio = (part, whole) => (whole ? part / whole : null);

/** Rows of the comparison: [name, value of an arm]. */
const MEASURES = [
  ["Answers", (arm) => number(arm.answers)],
  ["Score", (arm) => number(arm.score)],
  ["Voices", (arm) => `${number(arm.voices)} in ${plural(arm.opinions, "opinion")}`],
  ["Other sources", (arm) => Object.entries(arm.others).map(([source, said]) => `${source} ${number(said.score)} in ${plural(said.opinions, "opinion")}`).join(", ") || "–"],
  ["Feedback rate", (arm) => percent(ratio(arm.opinions, arm.answers), 1)],
  ["Errors", (arm) => percent(ratio(arm.errors, arm.answers + arm.errors), 1)],
  ["Cut off", (arm) => percent(ratio(arm.cut_off, arm.answers), 1)],
  ["Repetition", (arm) => percent(ratio(arm.repetition, arm.answers), 1)],
  ["Broken calls", (arm) => percent(ratio(arm.broken_calls, arm.calls), 1)],
  ["Refusals", (arm) => percent(ratio(arm.refusals, arm.answers - arm.errors), 1)],
  ["Tokens an answer", (arm) => number(ratio(arm.tokens, arm.answers))],
  ["First token", (arm) => duration(ratio(arm.first_seconds, arm.answers))],
  ["Time of an answer", (arm) => duration(ratio(arm.seconds, arm.answers))],
  ["Labels", (arm) => Object.entries(arm.labels).map(([label, count]) => `${label} ${number(count)}`).join(", ") || "–"],
];

function Arms({ evidence }) {
  const columns = [
    { name: "", hidden: "Measure", value: ([name]) => name },
    { name: `Current: ${evidence.current.version}`, numeric: true, value: ([, of]) => of(evidence.current) },
    { name: `Candidate: ${evidence.candidate.version}`, numeric: true, value: ([, of]) => of(evidence.candidate) },
  ];
  return html`<${Card} title="Arms"><${Table} label="Arms" columns=${columns} rows=${MEASURES} keyOf=${([name]) => name} /><//>`;
}

function Test({ canary, look }) {
  const { gain, alpha, power } = canary.policy;
  return html`
    <${Card} title="Test">
      <p><${Interval} from=${-2} to=${2} low=${look.low} high=${look.high} middle=${look.effect} label=${`difference ${number(look.effect)}, interval ${number(look.low)} to ${number(look.high)}`} /> ${look.effect >= 0 ? "+" : ""}${number(look.effect)} (${number(look.low)} to ${number(look.high)})</p>
      <p class="muted">Difference of the mean scores, which lie between -1 and 1. ${look.verdict === "open" ? "Not decided yet" : `The candidate is ${look.verdict}`}, after ${plural(look.observed[0], "voice")} and ${number(look.observed[1])}.</p>
      <${Progress} value=${look.progress} total=${1} label="Way to a decision" />
      <p class="muted">A gain of ${number(gain)} is found with ${percent(power)}; a candidate that is no better is promoted in at most ${percent(alpha, 1)}.</p>
    <//>
  `;
}

function Guardrails({ rails }) {
  const columns = [
    { name: "Guardrail", value: (rail) => rail.name.replaceAll("_", " ") },
    { name: "Allowed", numeric: true, value: (rail) => number(rail.allowed) },
    { name: "Seen", numeric: true, value: (rail) => number(rail.effect) },
    { name: "At least", numeric: true, value: (rail) => number(rail.low) },
    { name: "", hidden: "State", value: (rail) => html`<${Chip} tone=${rail.crossed ? "bad" : "good"}>${rail.crossed ? "crossed" : "kept"}<//>` },
  ];
  const none = html`<${Empty} title="None looks yet">They begin once the candidate has given enough answers.<//>`;
  return html`<${Card} title="Guardrails"><${Table} label="Guardrails" narrow columns=${columns} rows=${rails} keyOf=${(rail) => rail.name} empty=${none} /><p class="muted">A rise of a share, or the logarithm of a ratio. One that is surely above what is allowed rolls the candidate back at once.</p><//>`;
}

export function CanaryPage({ id }) {
  const mayDecide = useMay("attach", "admin");
  const canary = usePolled(() => get(`/v1/canaries/${encodeURIComponent(id)}`, {}, { quiet: true }), 2, [id]);
  const decide = async (found, decision) => {
    const promotes = decision === "promote";
    const body = promotes ? `${found.candidate} answers all requests from then on, whatever the test says by now.` : `${found.current} answers all requests again.`;
    const agreed = await confirmed({ title: promotes ? `Promote ${found.candidate}?` : `Roll ${found.candidate} back?`, body: html`<p>${body} This ends the canary.</p>`, action: promotes ? "Promote it" : "Roll it back" });
    if (!agreed) return;
    await attempt(() => post(`/v1/canaries/${encodeURIComponent(id)}/decide`, { decision }), "It is decided.");
    canary.reload();
  };
  const actions = (found) => mayDecide && found.state === "running" && html`<button onClick=${() => decide(found, "promote")}>Promote</button><button class="danger" onClick=${() => decide(found, "roll_back")}>Roll back</button>`;
  return html`
    <${Loaded} state=${canary}>
      ${(found) => html`
        <${Page} title=${`Canary of ${found.candidate}`} note=${`${percent(found.policy.share)} of the requests for ${found.adapter}${found.attached ? " and for the base model's name" : ""}, against ${found.current}.`} actions=${actions(found)}>
          <${Figures}>
            <${Figure} label="State" value=${html`<${Chip} tone=${TONES[found.state]}>${found.state}<//>`} hint=${found.ended_at ? `since ${moment(found.ended_at)}` : `since ${moment(found.began_at)}`} />
            ${found.origin && html`<${Figure} label="Begun by" value=${html`<a href=${link("learning", found.origin)}>${found.origin}</a>`} />`}
            ${found.evidence && html`<${Figure} label="Answered by the candidate" value=${percent(ratio(found.evidence.candidate.answers, found.evidence.candidate.answers + found.evidence.current.answers), 1)} />`}
          <//>
          ${found.decision && html`<${Card} wide title="Decision"><p>${found.decision.detail}${found.decision.by !== "controller" && html` By <code>${found.decision.by}</code>.`}</p><//>`}
          ${found.evidence
            ? html`<div class="grid"><${Arms} evidence=${found.evidence} /><div class="stacked"><${Test} canary=${found} look=${found.evidence.look} /><${Guardrails} rails=${found.evidence.guardrails} /></div></div>`
            : html`<${Empty} title="Nothing is counted yet">The first look comes within seconds of the first answers.<//>`}
        <//>
      `}
    <//>
  `;
}
