// The logs of gateway and engines, filtered by them and followed.

import { html, useState } from "../vendor/htm-preact.js";
import { useProcessLogs } from "../core/process_logs.js";
import { Card, Empty, Failure } from "./basics.js";
import { EventLog } from "./event_log.js";
import { Check, Select, TextField } from "./form.js";

const LEVELS = [["debug", "every level"], ["info", "info and worse"], ["warning", "warning and worse"], ["error", "errors"]];
const TONES = { debug: "", info: "", warning: "busy", error: "bad" };

function shown(line) {
  const fields = Object.entries({ request_id: line.request_id, ...line.fields }).filter(([, value]) => value !== null);
  const rest = fields.map(([name, value]) => `${name}=${value}`).join(" ");
  return { id: line.id, time: line.time, kind: line.level, tone: TONES[line.level], bad: line.level === "error", text: `${line.process}: ${line.message} ${rest}`, detail: line.exception };
}

export function ProcessLogs() {
  const [query, setQuery] = useState({ process: "", level: "info", text: "", request_id: "" });
  const [follow, setFollow] = useState(true);
  const { lines, processes, unreachable, error, loading } = useProcessLogs(query, follow);
  const set = (name) => (value) => setQuery({ ...query, [name]: value });
  const filtered = query.process || query.text || query.request_id;
  const nothing = html`<${Empty} title=${filtered ? "No line is like this" : "Nothing is kept"}>${filtered ? "Change the filter." : "TEMPER_LOG_LINES says how many lines a process keeps."}<//>`;
  return html`
    <${Card} wide title="Logs of the gateway that answers and of all engines">
      <div class="fields">
        <${Select} label="Process" value=${query.process} change=${set("process")} options=${[["", "all"], ...processes]} />
        <${Select} label="Level" value=${query.level} change=${set("level")} options=${LEVELS} />
        <${TextField} label="Has" value=${query.text} change=${set("text")} placeholder="words of a line" />
        <${TextField} label="Request" value=${query.request_id} change=${set("request_id")} placeholder="x-request-id, chatcmpl-…" />
        <${Check} label="Follow" checked=${follow} change=${setFollow} />
      </div>
      ${unreachable.map((engine) => html`<p class="failure" role="alert" key=${engine}>${engine} does not answer: its lines are missing.</p>`)}
      ${error && html`<${Failure} error=${error} />`}
      ${loading ? html`<p class="muted loading" role="status">Loading …</p>` : lines.length ? html`<${EventLog} label="Logs" events=${lines.map(shown)} follow=${follow} />` : !error && nothing}
    <//>
  `;
}
