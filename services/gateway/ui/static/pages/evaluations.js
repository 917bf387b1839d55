// Evaluations: suites of items, runs of them on versions, and how the versions compare.

import { html, useState } from "../vendor/htm-preact.js";
import { choices } from "../core/adapters.js";
import { get, post, remove } from "../core/api.js";
import { ago, duration, number, percent, plural, shortId } from "../core/format.js";
import { go, link, useList, useLoaded, useMay, usePolled } from "../core/hooks.js";
import { Card, Chip, Empty, Figure, Figures, Loaded, More, Page, Progress, Steps, Table, Tabs } from "../parts/basics.js";
import { Comparison, Items } from "../parts/comparison.js";
import { attempt, confirmed, toast } from "../parts/dialogs.js";
import { Check, FileField, NumberField, Select, TextArea, TextField, parseLines, typedNumber } from "../parts/form.js";

const TABS = [{ id: "runs", name: "Runs" }, { id: "suites", name: "Suites" }];
const SCORERS = [["exact", "exact text"], ["numeric", "number"], ["contains", "contains"], ["regex", "regular expression"], ["choice", "choice"]];
const hasEnded = (run) => ["succeeded", "failed", "cancelled"].includes(run.state);

/** Targets to choose from; the one that was asked for is among them. */
async function loadTargets(wanted) {
  const found = ["base", ...(await choices())];
  return wanted && !found.includes(wanted) ? [wanted, ...found] : found;
}

function Choices({ legend, options, chosen, change }) {
  const toggle = (option) => change(chosen.includes(option) ? chosen.filter((one) => one !== option) : [...chosen, option]);
  return html`<fieldset><legend>${legend}</legend><div class="choices">${options.map((option) => html`<${Check} key=${option} label=${option} checked=${chosen.includes(option)} change=${() => toggle(option)} />`)}</div></fieldset>`;
}

function NewRun({ suites, wanted, reload }) {
  const targets = useLoaded(() => loadTargets(wanted), []);
  const [chosenSuites, setSuites] = useState([]);
  const [chosenTargets, setTargets] = useState(["base", ...(wanted ? [wanted] : [])]);
  const [samples, setSamples] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    const sampling = typedNumber(samples) ? { samples: typedNumber(samples), temperature: 0.7 } : {};
    const run = await attempt(() => post("/v1/evaluations", { suites: chosenSuites, targets: chosenTargets, sampling }), "The run is queued.");
    if (run) go("evaluations", run.id);
    reload();
  };
  return html`
    <${Card} wide title="New run">
      <form class="stacked" onSubmit=${submit}>
        <${Choices} legend="Suites" options=${suites.map((suite) => suite.id)} chosen=${chosenSuites} change=${setSuites} />
        <${Loaded} state=${targets}>${(found) => html`<${Choices} legend="Targets" options=${found} chosen=${chosenTargets} change=${setTargets} />`}<//>
        <div class="fields filter"><${NumberField} label="Samples an item" placeholder="1, greedy" min="1" step="1" value=${samples} change=${setSamples} /></div>
        <div><button class="primary" type="submit" disabled=${!chosenSuites.length || !chosenTargets.length}>Run ${plural(chosenSuites.length, "suite")} on ${plural(chosenTargets.length, "target")}</button></div>
      </form>
    <//>
  `;
}

function Runs({ suites, wanted }) {
  const [chosen, setChosen] = useState([]);
  const mayTrain = useMay("train");
  const runs = useList("/v1/evaluations", {}, 2);
  const choose = (id) => setChosen(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  const best = (run) => (run.summaries ?? []).slice(0, 3).map((one) => `${one.target} ${one.mean <= 1 ? percent(one.mean) : number(one.mean)}`).join(" · ");
  const columns = [
    { name: "", hidden: "Compare", value: (run) => html`<input type="checkbox" aria-label=${`Compare ${run.id}`} checked=${chosen.includes(run.id)} disabled=${!hasEnded(run)} onChange=${() => choose(run.id)} />` },
    { name: "Run", wide: true, value: (run) => html`<a href=${link("evaluations", run.id)} title=${run.id}>${shortId(run.id)}</a>` },
    { name: "State", value: (run) => html`<${Chip}>${run.state}<//>` },
    { name: "Suites", value: (run) => run.suites?.map((one) => one.suite).join(", ") ?? "–" },
    { name: "Targets", wide: true, value: (run) => run.targets?.map((one) => one.name).join(", ") ?? "–" },
    { name: "Items", numeric: true, value: (run) => html`<${Steps} progress=${run.progress} />` },
    { name: "Scores", wide: true, value: best },
    { name: "Asked", value: (run) => ago(run.created_at) },
  ];
  return html`
    <${Card} wide title="Runs" actions=${html`<a class=${`button ${chosen.length ? "" : "off"}`} aria-disabled=${!chosen.length} href=${chosen.length ? link("evaluations", chosen.join("+")) : undefined}>Compare ${chosen.length || "chosen"}</a>`}>
      <${Loaded} state=${runs} empty=${(found) => !found.data.length && html`<${Empty} title="No run yet">${suites.length ? "Choose suites and targets below." : "Make a suite first, on the tab Suites."}<//>`}>
        ${(found) => html`<${Table} label="Runs" columns=${columns} rows=${found.data} /><${More} of=${runs} />`}
      <//>
    <//>
    ${mayTrain && suites.length > 0 && html`<${NewRun} suites=${suites} wanted=${wanted} reload=${runs.reload} />`}
  `;
}

function NewSuite({ reload }) {
  const [name, setName] = useState("");
  const [scorer, setScorer] = useState("exact");
  const [text, setText] = useState("");
  const [most, setMost] = useState("64");
  const pick = async (file) => file && setText(await file.text());
  const submit = async (event) => {
    event.preventDefault();
    const made = await attempt(() => {
      parseLines(text);
      return post("/v1/eval/suites", { name, scorer: { type: scorer }, sampling: { max_tokens: Number(most) }, jsonl: text });
    });
    if (!made) return;
    toast(`${made.id} has ${plural(made.items, "item")}.`);
    setText("");
    reload();
  };
  return html`
    <${Card} wide title="New suite">
      <form class="stacked" onSubmit=${submit}>
        <div class="fields">
          <${TextField} label="Name" value=${name} change=${setName} required placeholder="sums" />
          <${Select} label="An answer is right by" value=${scorer} change=${setScorer} options=${SCORERS} />
          <${NumberField} label="Most tokens" value=${most} change=${setMost} min="1" step="1" />
        </div>
        <${FileField} label="File" hint="JSONL: a prompt and what is expected, a line each." accept=".jsonl,.json,.txt" pick=${pick} />
        <${TextArea} label="Items" rows=${5} class="mono" value=${text} change=${setText} placeholder='{"prompt": "What is 12 plus 7?", "expected": "19"}' />
        <div><button class="primary" type="submit" disabled=${!name || !text.trim()}>Make the suite</button></div>
      </form>
    <//>
  `;
}

function Suites({ suites }) {
  const drop = async (suite) => {
    const agreed = await confirmed({ title: `Delete ${suite.id}?`, body: html`<p>Its ${plural(suite.items, "item")} are removed. Runs that used it keep their scores, but cannot be repeated. Its number is not used again.</p>`, action: "Delete the version" });
    if (!agreed) return;
    await attempt(() => remove(`/v1/eval/suites/${encodeURIComponent(suite.id)}`), `${suite.id} is deleted.`);
    suites.reload();
  };
  const columns = [
    { name: "Suite", wide: true, value: (suite) => suite.id },
    { name: "Scorer", value: (suite) => suite.settings.scorer.type },
    { name: "Items", numeric: true, value: (suite) => number(suite.items) },
    { name: "Description", value: (suite) => suite.settings.description || "–" },
    { name: "Made", value: (suite) => ago(suite.created_at) },
    { name: "", hidden: "Actions", value: (suite) => html`<button class="quiet" onClick=${() => drop(suite)}>Delete</button>` },
  ];
  return html`
    <${Card} wide title="Suites">
      <${Loaded} state=${suites} empty=${(found) => !found.data.length && html`<${Empty} title="No suite yet">A suite is a list of prompts with the answers that are right.<//>`}>
        ${(found) => html`<${Table} label="Suites" columns=${columns} rows=${found.data} /><${More} of=${suites} />`}
      <//>
    <//>
    <${NewSuite} reload=${suites.reload} />
  `;
}

function Run({ ids }) {
  const [id] = ids;
  const [ended, setEnded] = useState(false);
  const load = async () => {
    const run = await get(`/v1/evaluations/${id}`, {}, { quiet: true });
    setEnded(hasEnded(run));
    return run;
  };
  const run = usePolled(load, ended ? 0 : 1, [id]);
  return html`
    <${Page} title=${ids.length > 1 ? `${ids.length} runs compared` : "Evaluation"} actions=${html`<a class="button" href="#/evaluations">All evaluations</a>`}>
      <${Loaded} state=${run}>
        ${(found) => html`
          ${ids.length === 1 && html`
            <${Card} title=${found.id}>
              <div class="stacked">
                <div class="row"><${Chip}>${found.state}<//>${!hasEnded(found) && html`<${Progress} label="Items" value=${found.progress.step} total=${found.progress.total_steps} />`}</div>
                ${found.reason && html`<p class="failure">${found.reason}</p>`}
                <${Figures}>
                  <${Figure} label="Answers" value=${html`<${Steps} progress=${found.progress} />`} />
                  <${Figure} label="Suites" value=${found.suites?.map((one) => one.suite).join(", ") ?? "–"} />
                  <${Figure} label="Targets" value=${found.targets?.map((one) => one.name).join(", ") ?? "–"} />
                  <${Figure} label="Took" value=${found.finished_at ? duration(found.finished_at - found.created_at) : "–"} />
                <//>
              </div>
            <//>`}
          ${ended && html`<${Comparison} of=${ids} />`}
          ${ids.length === 1 && found.suites && found.targets && found.progress.step > 0 && html`<${Items} key=${ended} run=${found} />`}
        `}
      <//>
    <//>
  `;
}

export default function Evaluations({ parts: [which], query }) {
  const [tab, setTab] = useState("runs");
  const suites = useList("/v1/eval/suites", {}, 0);
  if (which) return html`<${Run} key=${which} ids=${which.split("+")} />`;
  return html`
    <${Page} title="Evaluations">
      <${Tabs} label="Evaluations" tabs=${TABS} chosen=${tab} choose=${setTab} />
      ${tab === "runs" ? html`<${Runs} suites=${suites.data?.data ?? []} wanted=${query.get("target")} />` : html`<${Suites} suites=${suites} />`}
    <//>
  `;
}
