// Events and logs: what jobs say, all of them together, the logs of gateway and engines, and the requests of this page.

import { html, useEffect, useMemo, useState } from "../vendor/htm-preact.js";
import { calls, get, on } from "../core/api.js";
import { duration, shortId } from "../core/format.js";
import { useMay, usePolled } from "../core/hooks.js";
import { useJobEvents } from "../core/job_events.js";
import { Card, Empty, Loaded, Page, Tabs } from "../parts/basics.js";
import { EventLog, line } from "../parts/event_log.js";
import { ProcessLogs } from "../parts/process_logs.js";
import { Check, Select, TextField } from "../parts/form.js";

const JOBS = 20;
const KINDS = [["", "every kind"], "state", "log", "published", "progress"];

function Filter({ kind, setKind, kinds, text, setText, follow, setFollow }) {
  return html`
    <div class="fields filter">
      ${kinds && html`<${Select} label="Kind" value=${kind} change=${setKind} options=${kinds} />`}
      <${TextField} label="Has" value=${text} change=${setText} placeholder="words, an adapter, an id" />
      <${Check} label="Follow" checked=${follow} change=${setFollow} />
    </div>
  `;
}

function JobEvents() {
  const [kind, setKind] = useState("");
  const [text, setText] = useState("");
  const [follow, setFollow] = useState(true);
  const jobs = usePolled(() => get("/v1/train/jobs", { limit: JOBS }, { quiet: true }), 3);
  const ids = jobs.data?.data.map((job) => job.id) ?? [];
  const known = useJobEvents(ids);
  const names = new Map(jobs.data?.data.map((job) => [job.id, job.adapter || job.kind]));
  const shown = useMemo(() => {
    const found = ids.flatMap((id) => {
      const steps = (known[id]?.points ?? []).map((point) => ({ id: `${id}/step ${point.step}`, time: point.time, kind: "progress", data: { step: point.step, loss: point.loss } }));
      const said = (known[id]?.log ?? []).map((event) => ({ ...event, id: `${id}/${event.id}` }));
      return [...steps, ...said].map((event) => ({ ...event, text: `${names.get(id)} ${shortId(id)}: ${line(event)}` }));
    });
    const wanted = text.toLowerCase();
    return found
      .filter((event) => (!kind || event.kind === kind) && (!wanted || `${event.text} ${event.id}`.toLowerCase().includes(wanted)))
      .sort((a, b) => a.time - b.time);
  }, [known, kind, text, ids.join()]);
  return html`
    <${Card} wide title=${`Events of the last ${JOBS} jobs`}>
      <${Filter} kind=${kind} setKind=${setKind} kinds=${KINDS} text=${text} setText=${setText} follow=${follow} setFollow=${setFollow} />
      <${Loaded} state=${jobs}>
        ${() => (shown.length ? html`<${EventLog} label="Events" events=${shown} follow=${follow} />` : html`<${Empty} title=${kind || text ? "No event is like this" : "Nothing has happened yet"}>${kind || text ? "Change the filter." : "Jobs say here when they begin, learn, publish and end."}<//>`)}
      <//>
    <//>
  `;
}

function Calls() {
  const [text, setText] = useState("");
  const [follow, setFollow] = useState(true);
  const [, redraw] = useState(0);
  useEffect(() => on("call", () => redraw((count) => count + 1)), []);
  const shown = calls
    .map((call, index) => ({ id: index, time: call.time, kind: call.method, status: call.status, text: `${call.path} ${call.status || "no answer"} ${duration(call.ms / 1000)}` }))
    .filter((call) => call.text.toLowerCase().includes(text.toLowerCase()));
  return html`
    <${Card} wide title="Requests of this page">
      <${Filter} text=${text} setText=${setText} follow=${follow} setFollow=${setFollow} />
      ${shown.length ? html`<${EventLog} label="Requests of this page" events=${shown} follow=${follow} />` : html`<${Empty} title="No request is like this">What the dashboard asks of the API is listed here, so that you can ask the same.<//>`}
    <//>
  `;
}

export default function Events() {
  const seesJobs = useMay("train", "admin");
  const seesLogs = useMay("admin");
  const tabs = [
    ...(seesJobs ? [{ id: "jobs", name: "Jobs", content: JobEvents }] : []),
    ...(seesLogs ? [{ id: "processes", name: "Gateway and engines", content: ProcessLogs }] : []),
    { id: "calls", name: "Requests of this page", content: Calls },
  ];
  const [chosen, choose] = useState(tabs[0].id);
  const tab = tabs.find((one) => one.id === chosen);
  return html`
    <${Page} title="Events and logs">
      <${Tabs} label="Events" tabs=${tabs} chosen=${chosen} choose=${choose} />
      <${tab.content} />
    <//>
  `;
}
