// The form that submits a training job: from a file or from lines, with its settings.

import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { upload } from "../core/api.js";
import { percent, plural } from "../core/format.js";
import { go, useMay } from "../core/hooks.js";
import { Card, Page, Progress } from "./basics.js";
import { attempt, toast } from "./dialogs.js";
import { Check, FileField, NumberField, Select, TextArea, TextField, parseLines, typedNumber } from "./form.js";

// What the rows of a file become, by the kind of job.
const KINDS = {
  sft: { name: "SFT: learn answers", rows: "examples", sample: '{"prompt": "What is 2 plus 2?", "completion": "4"}' },
  dpo: { name: "DPO: prefer answers", rows: "examples", sample: '{"prompt": "hello", "chosen": "Good day!", "rejected": "yo"}' },
  kto: { name: "KTO: thumbs up and down", rows: "examples", sample: '{"prompt": "hello", "completion": "Good day!", "label": true}' },
  grpo: { name: "GRPO: groups with rewards", rows: "groups", sample: '{"prompt": "2 + 2?", "completions": ["4", "5"], "rewards": [1, 0]}' },
  opd: { name: "OPD: learn from a teacher", rows: "prompts", sample: '{"prompt": "What is 2 plus 2?"}' },
  draft: { name: "Draft: keep the drafter sharp", rows: "examples", sample: '{"prompt": "What is 2 plus 2?"}' },
};
const NUMBERS = [["epochs", "Epochs"], ["learning_rate", "Learning rate"], ["batch_size", "Batch size"], ["seed", "Seed"], ["eval_fraction", "Share held out"], ["checkpoint_every", "Checkpoint every"]];
const WITHOUT = { grpo: ["batch_size", "eval_fraction"], opd: ["batch_size", "eval_fraction"] };

function readFile(file, progress) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onprogress = (event) => progress(event.loaded / event.total);
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsText(file);
  });
}

/** More settings of the API, as JSON. */
function parseMore(text) {
  if (!text.trim()) return {};
  const more = JSON.parse(text);
  if (more === null || typeof more !== "object" || Array.isArray(more)) throw new Error("further settings are no JSON object");
  return more;
}

export function JobForm() {
  const [kind, setKind] = useState("sft");
  const [adapter, setAdapter] = useState("");
  const [startFrom, setStartFrom] = useState("");
  const [file, setFile] = useState(null);
  const [text, setText] = useState("");
  const [numbers, setNumbers] = useState({});
  const [more, setMore] = useState("");
  const [attach, setAttach] = useState(false);
  const [sent, setSent] = useState(null);
  const mayAttach = useMay("attach", "admin");
  const chosen = KINDS[kind];
  const attaches = kind !== "draft"; // a drafter answers nothing
  const rows = useMemo(() => {
    try {
      return { found: parseLines(text), error: null };
    } catch (error) {
      return { found: [], error };
    }
  }, [text]);
  const pick = async (picked) => {
    setFile(picked);
    if (!picked) return;
    setSent({ step: "Reading", share: 0 });
    await attempt(async () => setText(await readFile(picked, (share) => setSent({ step: "Reading", share }))));
    setSent(null);
  };
  const submit = async (event) => {
    event.preventDefault();
    setSent({ step: "Sending", share: 0 });
    const job = await attempt(() => {
      const body = { adapter, attach: attach && attaches, [chosen.rows]: rows.found, ...parseMore(more) };
      for (const [name] of NUMBERS) {
        const value = typedNumber(numbers[name]);
        if (value !== undefined && !WITHOUT[kind]?.includes(name)) body[name] = value;
      }
      if (startFrom) body.start_from = startFrom;
      return upload(`/v1/train/${kind}`, body, (share) => setSent({ step: share < 1 ? "Sending" : "Checking", share }));
    });
    setSent(null);
    if (!job) return;
    toast("The job is queued.");
    go("jobs", job.id);
  };
  return html`
    <${Page} title="New job" actions=${html`<a class="button" href="#/jobs">All jobs</a>`}>
      <${Card}>
        <form class="stacked" onSubmit=${submit}>
          <div class="fields">
            <${Select} label="Method" value=${kind} change=${setKind} options=${Object.entries(KINDS).map(([id, one]) => [id, one.name])} />
            <${TextField} label="Adapter" value=${adapter} change=${setAdapter} required placeholder="my-adapter" hint="A version of it is made." />
            <${TextField} label="Start from" value=${startFrom} change=${setStartFrom} placeholder="a new adapter" hint="A version, name@3." />
          </div>
          <${FileField} label="File" hint="JSONL: a JSON object a line. It is read here, and sent with the job." accept=".jsonl,.json,.txt" pick=${pick} />
          ${(!file || text.length < 20_000) && html`<${TextArea} label="Lines" rows=${6} class="mono" value=${text} change=${setText} placeholder=${chosen.sample} />`}
          ${rows.error ? html`<p class="failure" role="alert">${rows.error.message}</p>` : text && html`<p class="muted">${plural(rows.found.length, "row")}</p>`}
          <div class="fields">
            ${NUMBERS.filter(([name]) => !WITHOUT[kind]?.includes(name)).map(([name, label]) => html`<${NumberField} key=${name} label=${label} placeholder="default" value=${numbers[name] ?? ""} change=${(value) => setNumbers({ ...numbers, [name]: value })} />`)}
          </div>
          <details><summary>Further settings</summary><${TextArea} label="Fields of the API as JSON" rows=${4} class="mono" value=${more} change=${setMore} placeholder='{"lora": {"rank": 16}}' /></details>
          ${attaches && mayAttach && html`<${Check} label="Answer everybody with the version when it is done (attach)" checked=${attach} change=${setAttach} />`}
          ${sent && html`<div class="row" role="status"><span>${sent.step} … ${percent(sent.share)}</span><${Progress} label=${sent.step} value=${sent.share} total=${1} /></div>`}
          <div class="row"><button class="primary" type="submit" disabled=${sent !== null || !adapter || !rows.found.length}>Submit the job</button></div>
        </form>
      <//>
    <//>
  `;
}
