// Overview: what runs now, how fast, in which memory, and what trains.

import { html, useMemo } from "../vendor/htm-preact.js";
import { get } from "../core/api.js";
import { bytes, duration, number, percent, plural, shortId } from "../core/format.js";
import { link, useMay, usePolled } from "../core/hooks.js";
import { difference, quantile } from "../core/rates.js";
import { Card, Chip, Empty, Figure, Figures, Loaded, Page, Progress, StackedBar, Steps, Table } from "../parts/basics.js";
import { Plot } from "../parts/plot.js";

const SECONDS = 1;
const LONGEST_SECONDS = 10; // between two answers that belong to one curve
const KEPT_SECONDS = 300;
const MEMORY = ["weights", "kv", "states", "training", "adapters", "workspace", "graphs", "sampler", "teacher", "free"];
const TIERS = ["device", "host", "disk", "store"];

/** Rates and latencies between two answers of /v1/status that follow each other. */
function pointOf(before, now) {
  const change = difference(before, now);
  return {
    time: now.time,
    decode: change.decode,
    prefill: change.prefill,
    firstMedian: quantile(change.firstToken, 0.5),
    firstSlow: quantile(change.firstToken, 0.95),
    betweenMedian: quantile(change.betweenTokens, 0.5),
    betweenSlow: quantile(change.betweenTokens, 0.95),
    running: now.engines.reduce((sum, engine) => sum + engine.running, 0),
    waiting: now.engines.reduce((sum, engine) => sum + engine.waiting, 0),
  };
}

/** What the page has seen: who comes back to it sees the curves go on, with a gap for the time away. */
const seen = { status: null, points: [] };

function remember(status) {
  const before = seen.status;
  if (before === status) return;
  seen.status = status;
  if (before === null) return;
  const away = status.time - before.time > LONGEST_SECONDS;
  const added = away ? { time: before.time + SECONDS } : pointOf(before, status);
  seen.points = [...seen.points, added].filter((point) => status.time - point.time < KEPT_SECONDS);
}

const seconds = (value) => `${Math.round(-value)} s`;

function Rates({ points, now }) {
  const ages = useMemo(() => points.map((point) => point.time - now), [points]);
  const of = (...names) => useMemo(() => [ages, ...names.map((name) => points.map((point) => point[name] ?? null))], [points]);
  const last = points.at(-1);
  const shared = { xFormat: seconds, height: 150, xStep: 15, xFloor: -60 };
  return html`
    <div class="quads">
      <${Card} title="Tokens per second">
        <${Plot} ...${shared} data=${of("decode", "prefill")} format=${number} zero=${10} series=${[{ label: "answers", tone: 0 }, { label: "prompts", tone: 1 }]} summary=${`Tokens per second: answers ${number(last?.decode)}, prompts ${number(last?.prefill)}`} />
      <//>
      <${Card} title="Time to first token">
        <${Plot} ...${shared} data=${of("firstMedian", "firstSlow")} format=${duration} zero=${0.01} series=${[{ label: "median", tone: 2, points: true, spanGaps: true }, { label: "95 %", tone: 3, points: true, spanGaps: true }]} summary=${`Time to first token, median ${duration(last?.firstMedian)}`} />
      <//>
      <${Card} title="Between tokens">
        <${Plot} ...${shared} data=${of("betweenMedian", "betweenSlow")} format=${duration} zero=${0.001} series=${[{ label: "median", tone: 2, spanGaps: true }, { label: "95 %", tone: 3, spanGaps: true }]} summary=${`Time between tokens, median ${duration(last?.betweenMedian)}`} />
      <//>
      <${Card} title="Requests">
        <${Plot} ...${shared} data=${of("running", "waiting")} format=${number} zero=${4} series=${[{ label: "running", tone: 0 }, { label: "waiting", tone: 3 }]} summary=${`Requests: ${number(last?.running)} running, ${number(last?.waiting)} waiting`} />
      <//>
    </div>
  `;
}

function Engine({ engine }) {
  const total = Object.values(engine.memory_plan).reduce((sum, size) => sum + size, 0);
  const parts = MEMORY.filter((name) => engine.memory_plan[name]).map((name, tone) => ({
    name,
    value: engine.memory_plan[name],
    text: bytes(engine.memory_plan[name]),
    tone: name === "free" ? "free" : tone,
  }));
  const blocks = engine.kv_blocks;
  const hits = TIERS.reduce((sum, tier) => sum + (engine.cache_hit_tokens[tier] ?? 0), 0);
  const misses = Math.max(0, engine.tokens.prompt - hits);
  const cache = [
    ...TIERS.map((name, tone) => ({ name, value: engine.cache_hit_tokens[name] ?? 0, tone })),
    { name: "computed", value: misses, tone: "free" },
  ].map((part) => ({ ...part, text: `${number(part.value)} · ${percent(part.value / engine.tokens.prompt)}` }));
  return html`
    <${Card} wide title=${`Engine ${engine.name}`} actions=${html`<${Chip}>${engine.draining ? "draining" : engine.ready ? "ready" : "away"}<//>${engine.breaker !== "closed" && html`<${Chip} tone="bad">breaker ${engine.breaker}<//>`}`}>
      ${engine.error && html`<p class="failure">${engine.error}</p>`}
      <${Figures}>
        <${Figure} label="Running" value=${number(engine.running)} />
        <${Figure} label="Waiting" value=${number(engine.waiting)} hint=${`of ${number(engine.max_waiting)}`} />
        <${Figure} label="KV blocks in use" value=${percent(blocks.used / blocks.total)} hint=${`${percent(blocks.cached / blocks.total)} cached`} />
        <${Figure} label="State slots in use" value=${`${engine.state_slots.used} / ${engine.state_slots.total}`} hint=${`${engine.state_slots.cached} cached`} />
        <${Figure} label="Attached" value=${engine.attached_adapter ?? "base"} />
        <${Figure} label="Adapters loaded" value=${engine.loaded_adapters.length} />
      <//>
      ${total > 0 && html`<h3>Memory plan <span class="muted">${bytes(total)}</span></h3><${StackedBar} label="Memory plan" parts=${parts} total=${total} />`}
      <h3>Prompt tokens by where they came from <span class="muted">${number(engine.tokens.prompt)}</span></h3>
      ${engine.tokens.prompt ? html`<${StackedBar} label="Prompt tokens" parts=${cache} total=${engine.tokens.prompt} />` : html`<p class="muted">No request has ended yet.</p>`}
    <//>
  `;
}

const REQUESTS = [
  { name: "Request", value: (one) => html`<code title=${one.id}>${shortId(one.id)}</code>` },
  { name: "Phase", value: (one) => html`<${Chip}>${one.phase}<//>` },
  { name: "Answers as", value: (one) => (one.rollout ? "rollout of a job" : (one.adapter ?? "base")) },
  { name: "Prompt", numeric: true, value: (one) => (one.phase === "prefill" ? `${number(one.computed_tokens)} / ${number(one.prompt_tokens)}` : number(one.prompt_tokens)) },
  { name: "Cached", numeric: true, value: (one) => number(one.cached_tokens) },
  { name: "Answer", numeric: true, value: (one) => number(one.output_tokens) },
  { name: "Age", numeric: true, value: (one) => duration(one.age_seconds) },
  { name: "Key", value: (one) => one.key_id ?? "–" },
];
const NO_REQUESTS = html`<${Empty} title="Nothing runs right now">Send a message on the <a href="#/chat">chat page</a>, or point an OpenAI client at this gateway.<//>`;

function Requests() {
  const requests = usePolled(() => get("/v1/requests", { limit: 100 }, { quiet: true }), SECONDS);
  const title = requests.data ? `Requests now: ${number(requests.data.total)}` : "Requests now";
  return html`
    <${Card} wide title=${title}>
      <${Loaded} state=${requests} empty=${(found) => !found.data.length && NO_REQUESTS}>
        ${(found) => html`<${Table} label="Requests now" columns=${REQUESTS} rows=${found.data} />`}
      <//>
    <//>
  `;
}

function Training() {
  const jobs = usePolled(() => get("/v1/train/jobs", { limit: 5, state: "running" }, { quiet: true }), 2 * SECONDS);
  return html`
    <${Card} wide title="What trains now">
      <${Loaded} state=${jobs} empty=${(found) => !found.data.length && html`<${Empty} title="No job runs">Collect examples in the <a href="#/chat">chat</a>, or <a href="#/jobs/new">submit a file</a>.<//>`}>
        ${(found) => found.data.map((job) => html`
            <div class="running-job" key=${job.id}>
              <a href=${link("jobs", job.id)}><strong>${job.adapter}</strong> <span class="muted">${job.kind}</span></a>
              <${Progress} value=${job.progress.step} total=${job.progress.total_steps} label=${`Job ${job.id}`} />
              <${Steps} progress=${job.progress} />
              <span class="muted">loss ${number(job.metrics.loss)} · ${job.progress.eta_seconds === null ? "preparing" : `${duration(job.progress.eta_seconds)} left`}</span>
            </div>`)}
      <//>
    <//>
  `;
}

/** Model of the engines, in words. */
const described = ({ model }) => (model ? `${model.id} on ${model.device}, ${model.dtype}, ${number(model.parameters)} parameters` : "No engine has been reached yet.");

export default function Overview() {
  const status = usePolled(() => get("/v1/status", {}, { quiet: true }), SECONDS);
  if (status.data) remember(status.data);
  const sees = useMay("train", "admin");
  return html`
    <${Page} title="Overview" note=${status.data && described(status.data)}>
      <${Loaded} state=${status}>
        ${(now) => html`
          <${Figures}>
            <${Figure} label="In flight" value=${number(now.gateway.in_flight)} hint=${`of ${number(now.gateway.max_in_flight)}`} />
            <${Figure} label="Engines ready" value=${`${now.engines.filter((engine) => engine.ready).length} / ${now.engines.length}`} />
            <${Figure} label="Jobs queued" value=${number(now.queues.training?.queued)} hint=${now.queues.training?.queued ? `oldest ${duration(now.queues.training.oldest_queued_seconds)}` : ""} />
            <${Figure} label="Batches queued" value=${number(now.queues.batches?.queued)} />
            <${Figure} label="Tokens answered" value=${number(now.tokens.completion ?? 0)} hint="by this gateway" />
            <${Figure} label="Up" value=${duration(now.time - now.gateway.started_at)} hint=${`version ${now.gateway.version}`} />
          <//>
          ${!Object.keys(now.queues).length && html`<p class="failure">Redis does not answer: jobs and batches wait until it does. Completions go on.</p>`}
          <${Rates} points=${seen.points} now=${now.time} />
          <${Requests} />
          ${sees && html`<${Training} />`}
          ${now.engines.map((engine) => html`<${Engine} key=${engine.id} engine=${engine} />`)}
          ${!now.engines.length && html`<${Empty} title="No engine is known">Set TEMPER_ENGINES, or start one with <code>temper up</code>.<//>`}
          <p class="muted">${plural(now.engines.length, "engine")}. The same as JSON: <code>GET /v1/status</code> and <code>GET /v1/requests</code>.</p>
        `}
      <//>
    <//>
  `;
}
