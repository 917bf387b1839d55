// Sessions: what engines keep of conversations, tier by tier.

import { html } from "../vendor/htm-preact.js";
import { post, remove, save } from "../core/api.js";
import { ago, bytes, duration, number } from "../core/format.js";
import { useList } from "../core/hooks.js";
import { Card, Chip, Empty, Loaded, More, Page, Table } from "../parts/basics.js";
import { attempt, confirmed } from "../parts/dialogs.js";

const pathOf = (session) => `/v1/sessions/${encodeURIComponent(session.id)}`;
const left = (session) => Math.max(0, session.expires_at - Date.now() / 1000);

export default function Sessions() {
  const sessions = useList("/v1/sessions", {}, 3);
  const drop = async (session) => {
    const agreed = await confirmed({ title: `Forget ${session.id}?`, body: html`<p>All engines forget its ${number(session.tokens)} tokens, and what only it has use for. Its next request is computed from the beginning.</p>`, action: "Forget the session" });
    if (!agreed) return;
    await attempt(() => remove(pathOf(session)), "The session is forgotten.");
    sessions.reload();
  };
  const keep = async (session) => {
    await attempt(() => post(`${pathOf(session)}/save`), "The session is saved.");
    sessions.reload();
  };
  const columns = [
    { name: "Session", wide: true, value: (session) => html`<code>${session.id}</code>` },
    { name: "Tokens", numeric: true, value: (session) => number(session.tokens) },
    { name: "Requests", numeric: true, value: (session) => number(session.requests) },
    { name: "Adapter", value: (session) => session.adapter ?? "base" },
    { name: "Where", value: (session) => Object.entries(session.bytes).map(([tier, size]) => `${tier} ${bytes(size)}`).join(", ") || "–" },
    { name: "Used", value: (session) => ago(session.used_at) },
    { name: "Kept for", value: (session) => duration(left(session)) },
    { name: "Saved", value: (session) => (session.saved ? html`<${Chip} tone="good">saved<//>` : "–") },
    { name: "", hidden: "Actions", value: (session) => html`<div class="row"><button onClick=${() => keep(session)}>Save</button><button onClick=${() => attempt(() => save(`${pathOf(session)}/export`, `${session.id}.session`))}>Export</button><button class="quiet" onClick=${() => drop(session)}>Forget</button></div>` },
  ];
  return html`
    <${Page} title="Sessions" note="Conversations whose computed state engines keep, so that their next request begins where the last one ended.">
      <${Card}>
        <${Loaded} state=${sessions} empty=${(found) => !found.data.length && html`<${Empty} title="No session is kept">Send requests with a <code>session_id</code>: what the model has computed of them is kept before other things.<//>`}>
          ${(found) => html`<${Table} label="Sessions" columns=${columns} rows=${found.data} /><${More} of=${sessions} />`}
        <//>
      <//>
    <//>
  `;
}
