// Keys and limits: what the reader's key may do, and all keys for an admin. Keys are made by `temper keys`.

import { html } from "../vendor/htm-preact.js";
import { get } from "../core/api.js";
import { number } from "../core/format.js";
import { useLoaded } from "../core/hooks.js";
import { Card, Chip, Empty, Loaded, Page, Table } from "../parts/basics.js";

const limit = (value) => (value ? number(value) : "none");
const date = (text) => (text ? text.slice(0, 10) : "–");
const state = (key) => (key.revoked_at ? "revoked" : key.valid ? "valid" : "expired");
const MEANINGS = {
  inference: "completions, batches, sessions, and everything else that only uses the model",
  train: "training jobs and sessions, evaluations, and downloads of what they made",
  attach: "changing which version answers for the base model's name",
  admin: "changing adapters by hand, and everybody's jobs",
};
const COLUMNS = [
  { name: "Key", value: (key) => html`<code>${key.id}</code> ${key.name}` },
  { name: "State", value: (key) => html`<${Chip}>${state(key)}<//>` },
  { name: "Scopes", value: (key) => key.scopes.join(", ") || "none" },
  { name: "Requests a minute", numeric: true, value: (key) => limit(key.limits.requests_per_minute) },
  { name: "Tokens a minute", numeric: true, value: (key) => limit(key.limits.tokens_per_minute) },
  { name: "At a time", numeric: true, value: (key) => limit(key.limits.concurrent_requests) },
  { name: "Made", value: (key) => date(key.created_at) },
  { name: "Expires", value: (key) => date(key.expires_at) },
];
const OPEN = html`<${Empty} title="This gateway has no keys">Everybody who reaches it may do everything. <code>temper keys create</code> and TEMPER_API_KEYS_FILE change that.<//>`;

export default function Keys() {
  const keys = useLoaded(() => get("/v1/keys"), []);
  return html`
    <${Page} title="Keys and limits" actions=${html`<button onClick=${keys.reload}>Refresh</button>`}>
      <${Loaded} state=${keys}>
        ${(found) => html`
          <${Card} title="What you may do">
            <ul class="stacked">${found.scopes.map((scope) => html`<li key=${scope}><${Chip} tone="good">${scope}<//> ${MEANINGS[scope]}</li>`)}</ul>
          <//>
          <${Card} wide title=${found.scopes.includes("admin") ? "Keys" : "Your key"}>
            ${found.required ? html`<${Table} label="Keys" columns=${COLUMNS} rows=${found.data} selected=${found.caller} />` : OPEN}
          <//>
        `}
      <//>
    <//>
  `;
}
