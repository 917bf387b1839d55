// Batches and files: requests that are answered when there is room.

import { html, useState } from "../vendor/htm-preact.js";
import { post, remove, save, upload } from "../core/api.js";
import { ago, bytes, moment, number, percent, plural } from "../core/format.js";
import { useList, useMay } from "../core/hooks.js";
import { Card, Chip, Empty, Loaded, More, Page, Progress, Table } from "../parts/basics.js";
import { attempt, confirmed, toast } from "../parts/dialogs.js";
import { FileField, Select } from "../parts/form.js";

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
const REASONS = 3;
const open = (batch) => ["validating", "in_progress", "finalizing"].includes(batch.status);

function NewBatch({ reload }) {
  const [file, setFile] = useState(null);
  const [endpoint, setEndpoint] = useState(ENDPOINTS[0]);
  const [share, setShare] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    setShare(0);
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    const batch = await attempt(async () => {
      const kept = await upload("/v1/files", form, setShare);
      return post("/v1/batches", { input_file_id: kept.id, endpoint, completion_window: "24h" });
    });
    setShare(null);
    if (batch) toast("The batch is queued.");
    reload();
  };
  return html`
    <${Card} wide title="New batch">
      <form class="stacked" onSubmit=${submit}>
        <${FileField} label="File of requests" hint='JSONL, a request a line: {"custom_id", "method": "POST", "url", "body"}.' required accept=".jsonl" pick=${setFile} />
        <div class="fields filter"><${Select} label="Endpoint" value=${endpoint} change=${setEndpoint} options=${ENDPOINTS} /></div>
        ${share !== null && html`<div class="row" role="status"><span>Sending … ${percent(share)}</span><${Progress} label="Sending" value=${share} total=${1} /></div>`}
        <div><button class="primary" type="submit" disabled=${!file || share !== null}>Send and queue</button></div>
      </form>
    <//>
  `;
}

/** Why a batch has failed, by lines of its file. */
function Reasons({ batch }) {
  const found = batch.errors?.data ?? [];
  const text = (one) => (one.line ? `line ${number(one.line)}: ${one.message}` : one.message);
  return found.length > 0 && html`<ul class="bad-text">${found.slice(0, REASONS).map((one, index) => html`<li key=${index}>${text(one)}</li>`)}${found.length > REASONS && html`<li>and ${plural(found.length - REASONS, "more error")}</li>`}</ul>`;
}

function Counts({ batch }) {
  const { total, completed, failed } = batch.request_counts;
  return html`<div class="row nowrap"><${Progress} label=${`Requests of ${batch.id}`} value=${completed + failed} total=${total} /><span>${number(completed)} / ${number(total)}${failed ? html` · <b>${plural(failed, "error")}</b>` : ""}</span></div>`;
}

export default function Batches() {
  const batches = useList("/v1/batches", {}, 2);
  const files = useList("/v1/files", {}, 5);
  const reload = () => Promise.all([batches.reload(), files.reload()]);
  const mayUse = useMay("inference");
  const cancel = async (batch) => {
    const agreed = await confirmed({ title: `Cancel ${batch.id}?`, body: html`<p>Requests that have run by then are in its files; the others are not answered.</p>`, action: "Cancel the batch" });
    if (!agreed) return;
    await attempt(() => post(`/v1/batches/${batch.id}/cancel`), "The batch is being cancelled.");
    reload();
  };
  const drop = async (file) => {
    const users = (batches.data?.data ?? []).filter((batch) => open(batch) && batch.input_file_id === file.id);
    const body = html`<p>${file.filename} (${bytes(file.bytes)}) is removed for good.</p>${users.length > 0 && html`<p>A batch that has not ended reads it: ${users.map((one) => one.id).join(", ")}. It fails.</p>`}`;
    if (!(await confirmed({ title: "Delete the file?", body, action: "Delete the file" }))) return;
    await attempt(() => remove(`/v1/files/${file.id}`), "The file is deleted.");
    reload();
  };
  const nameOf = (batch) => files.data?.data.find((file) => file.id === batch.input_file_id)?.filename;
  const keep = (id, name) => attempt(() => save(`/v1/files/${id}/content`, name));
  const batchColumns = [
    { name: "Batch", wide: true, value: (batch) => html`${nameOf(batch)} <code>${batch.id}</code><${Reasons} batch=${batch} />` },
    { name: "State", value: (batch) => html`<${Chip}>${batch.status}<//>` },
    { name: "Endpoint", value: (batch) => batch.endpoint },
    { name: "Requests", wide: true, value: (batch) => html`<${Counts} batch=${batch} />` },
    { name: "Queued", value: (batch) => ago(batch.created_at) },
    { name: "", hidden: "Actions", value: (batch) => html`<div class="row">${batch.output_file_id && html`<button onClick=${() => keep(batch.output_file_id, `${batch.id}.jsonl`)}>Results</button>`}${batch.error_file_id && html`<button onClick=${() => keep(batch.error_file_id, `${batch.id}-errors.jsonl`)}>Errors</button>`}${open(batch) && html`<button class="quiet" onClick=${() => cancel(batch)}>Cancel</button>`}</div>` },
  ];
  const fileColumns = [
    { name: "File", wide: true, value: (file) => file.filename },
    { name: "Id", value: (file) => html`<code>${file.id}</code>` },
    { name: "For", value: (file) => file.purpose },
    { name: "Size", numeric: true, value: (file) => bytes(file.bytes) },
    { name: "Made", value: (file) => moment(file.created_at) },
    { name: "", hidden: "Actions", value: (file) => html`<div class="row"><button onClick=${() => keep(file.id, file.filename)}>Download</button><button class="quiet" onClick=${() => drop(file)}>Delete</button></div>` },
  ];
  return html`
    <${Page} title="Batches and files">
      <${Card} wide title="Batches">
        <${Loaded} state=${batches} empty=${(found) => !found.data.length && html`<${Empty} title="No batch yet">A batch answers a file of requests when there is room, behind everybody's own requests.<//>`}>
          ${(found) => html`<${Table} label="Batches" columns=${batchColumns} rows=${found.data} /><${More} of=${batches} />`}
        <//>
      <//>
      ${mayUse && html`<${NewBatch} reload=${reload} />`}
      <${Card} wide title="Files">
        <${Loaded} state=${files} empty=${(found) => !found.data.length && html`<${Empty} title="No file yet">Files of batches, and what they were answered with, are kept here.<//>`}>
          ${(found) => html`<${Table} label="Files" columns=${fileColumns} rows=${found.data} /><${More} of=${files} />`}
        <//>
      <//>
    <//>
  `;
}
