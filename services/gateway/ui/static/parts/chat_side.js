// What stands beside a chat: how answers are drawn, and the examples that were collected.

import { html, useState } from "../vendor/htm-preact.js";
import { keepFile, post } from "../core/api.js";
import { LEARNERS, jobBody } from "../core/examples.js";
import { plural } from "../core/format.js";
import { go, useMay } from "../core/hooks.js";
import { Card, Chip, Empty } from "./basics.js";
import { attempt, toast } from "./dialogs.js";
import { Check, NumberField, Select, TextArea, TextField } from "./form.js";

const EFFORTS = [["", "as the model does"], ["none", "none"], ["minimal", "minimal"], ["low", "low"], ["medium", "medium"], ["high", "high"]];

export const SAMPLING = {
  system: "", effort: "", stop: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "512", seed: "",
  presence_penalty: "", frequency_penalty: "", repetition_penalty: "",
};

const NUMBERS = [
  ["temperature", "Temperature", "1"], ["top_p", "Top p", "1"], ["top_k", "Top k", "off"], ["min_p", "Min p", "0"],
  ["max_tokens", "Most tokens", "auto"], ["seed", "Seed", "random"], ["presence_penalty", "Presence penalty", "0"],
  ["frequency_penalty", "Frequency penalty", "0"], ["repetition_penalty", "Repetition penalty", "1"],
];

export function Sampling({ sampling, change, tools, changeTools, logprobs, changeLogprobs }) {
  const set = (name) => (value) => change({ ...sampling, [name]: value });
  return html`
    <${Card} title="Sampling">
      <div class="stacked">
        <div class="fields two">
          ${NUMBERS.map(([name, label, placeholder]) => html`<${NumberField} key=${name} label=${label} value=${sampling[name]} placeholder=${placeholder} change=${set(name)} />`)}
        </div>
        <${Select} label="Thinking" value=${sampling.effort} options=${EFFORTS} change=${set("effort")} />
        <${Check} label="Show token probabilities" checked=${logprobs} change=${changeLogprobs} />
        <details><summary>System prompt, stop strings, tools</summary>
          <div class="stacked">
            <${TextArea} label="System prompt" value=${sampling.system} change=${set("system")} />
            <${TextArea} label="Stop strings" rows=${2} hint="One a line, four at most." value=${sampling.stop} change=${set("stop")} />
            <${TextArea} label="Tools" rows=${5} hint="A JSON list, as OpenAI's API takes it." value=${tools} change=${changeTools} class="mono" />
          </div>
        </details>
      </div>
    <//>
  `;
}

function describe(example) {
  if (example.kind === "corrected") return html`<${Chip} tone="good">corrected<//> ${example.text}`;
  if (example.kind === "preferred") return html`<${Chip} tone="good">preferred<//> ${example.text}`;
  return html`<${Chip} tone=${example.good ? "good" : "bad"}>${example.good ? "good" : "bad"}<//> ${example.text}`;
}

function Train({ examples, model, clear }) {
  const [kind, setKind] = useState("sft");
  const [adapter, setAdapter] = useState("");
  const [epochs, setEpochs] = useState("");
  const [attach, setAttach] = useState(false);
  const [busy, setBusy] = useState(false);
  const mayAttach = useMay("attach", "admin");
  const learner = LEARNERS[kind];
  const found = learner.examples(examples);
  const name = adapter || (model.includes("@") ? model.split("@")[0] : "feedback");
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    const body = jobBody({ kind, adapter: name, examples: found, epochs, attach, startFrom: model.includes("@") ? model : null });
    const job = await attempt(() => post(`/v1/train/${kind}`, body));
    setBusy(false);
    if (!job) return;
    toast("The job is queued.");
    clear();
    go("jobs", job.id);
  };
  const download = () => keepFile(new Blob([found.map((one) => `${JSON.stringify(one)}\n`).join("")], { type: "application/jsonl" }), `${kind}.jsonl`);
  return html`
    <form class="stacked" onSubmit=${submit}>
      <${Select} label="Method" value=${kind} change=${setKind} options=${Object.entries(LEARNERS).map(([id, one]) => [id, one.name])} />
      <${TextField} label="Adapter" value=${adapter} change=${setAdapter} placeholder=${name} pattern="[a-z0-9][a-z0-9._\\-]*" hint="A version of it is made; a new name makes a new adapter." />
      <${NumberField} label="Epochs" value=${epochs} change=${setEpochs} placeholder="chosen by the trainer" min="1" step="1" />
      ${mayAttach && html`<${Check} label="Answer everybody with it when it is done" checked=${attach} change=${setAttach} />`}
      ${!found.length && html`<p class="note">${learner.missing}</p>`}
      <div class="row">
        <button class="primary" type="submit" disabled=${busy || !found.length}>Train on ${plural(found.length, "example")}</button>
        <button type="button" disabled=${!found.length} onClick=${download}>Download</button>
      </div>
    </form>
  `;
}

export function Examples({ examples, change, model }) {
  const mayTrain = useMay("train");
  return html`
    <${Card} title=${`Examples: ${examples.length}`} actions=${examples.length > 0 && html`<button class="quiet" onClick=${() => change([])}>Clear</button>`}>
      ${!examples.length
        ? html`<${Empty} title="Nothing collected yet">Correct an answer, or give it a thumb: it becomes an example that a version can learn from.<//>`
        : html`
            <ul class="stacked">
              ${examples.map((example, index) => html`<li key=${index} class="row spread"><span class="grow example">${describe(example)}</span><button class="quiet icon" aria-label="Remove this example" onClick=${() => change(examples.filter((_, other) => other !== index))}>✕</button></li>`)}
            </ul>
            ${mayTrain ? html`<h3>Learn from them</h3><${Train} examples=${examples} model=${model} clear=${() => change([])} />` : html`<p class="muted">Training needs a key with the scope train.</p>`}
          `}
    <//>
  `;
}
