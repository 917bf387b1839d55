// Lines of a log of events, newest at the end; follows the end until its reader scrolls away.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import { moment, number, spoken } from "../core/format.js";
import { Chip } from "./basics.js";

/** What an event says, in one line. */
export function line(event) {
  const { data } = event;
  if (event.kind === "state") return [data.state, data.reason, data.result_adapter].filter(Boolean).join(" · ");
  if (event.kind === "published") return `${data.adapter}${data.attached ? ", attached" : ""}`;
  if (data.message) return data.message;
  return Object.entries(data)
    .filter(([, value]) => value !== null && typeof value !== "object")
    .map(([name, value]) => `${spoken(name)} ${typeof value === "number" ? number(value) : value}`)
    .join(" · ");
}

const isBad = (event) => event.bad || event.data?.state === "failed" || event.status === 0 || event.status >= 400;

/** Events: [{id, time, kind, tone?, bad?, text?, detail?, data}]. */
export function EventLog({ events, label, follow = true }) {
  const list = useRef(null);
  useEffect(() => {
    if (follow && list.current) list.current.scrollTop = list.current.scrollHeight;
  }, [events.length, events.at(-1)?.id, follow]);
  return html`
    <ul class="log" tabindex="0" aria-label=${label} ref=${list}>
      ${events.map((event) => html`<li key=${event.id} class=${isBad(event) ? "bad" : ""}><time class="muted">${moment(event.time)}</time><span><${Chip} tone=${event.tone}>${event.kind}<//></span><div>${event.text ?? line(event)}${event.detail && html`<details><summary>Traceback</summary><pre>${event.detail}</pre></details>`}</div></li>`)}
    </ul>
  `;
}
