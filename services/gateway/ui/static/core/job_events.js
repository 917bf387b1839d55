// Events of training jobs: followed while a job runs, and kept as curves and lines of a log.

import { useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { events, get } from "./api.js";

const RETRY_SECONDS = 2;
const ENDED = ["succeeded", "failed", "cancelled"];

export const hasEnded = (job) => ENDED.includes(job.state);

/** Adds an event to what is known of a job. */
function grown(known, event) {
  if (event.kind !== "progress" || event.data.loss === undefined) return { ...known, log: [...known.log, event] };
  return { ...known, points: [...known.points, { time: event.time, ...event.data }] };
}

const NOTHING = { points: [], log: [], ended: false, error: null };

/** Reads events of one job until it has ended; goes on where it was after a lost connection. */
async function follow(id, signal, take) {
  let last = null;
  for (;;) {
    try {
      const headers = last === null ? {} : { "last-event-id": last };
      for await (const event of events("GET", `/v1/train/jobs/${id}/events`, { signal, headers, quiet: true })) {
        if (event.id) last = event.id;
        take(event.data);
      }
      // A gateway that stops ends its streams: the job goes on, and another gateway tells of it.
      if (hasEnded(await get(`/v1/train/jobs/${id}`, {}, { signal, quiet: true }))) return;
    } catch (error) {
      if (signal.aborted) return;
      if (error.status && error.status < 500) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
  }
}

/** What is known of the jobs with these ids: {id: {points, log, ended, error}}. Redrawn at most once a frame. */
export function useJobEvents(ids) {
  const [known, setKnown] = useState({});
  const followed = useRef(new Map());
  const store = useRef({});
  const frame = useRef(0);
  const show = () => {
    frame.current ||= requestAnimationFrame(() => {
      frame.current = 0;
      setKnown({ ...store.current });
    });
  };
  useEffect(() => {
    for (const [id, controller] of followed.current) {
      if (ids.includes(id)) continue;
      controller.abort();
      followed.current.delete(id);
      delete store.current[id];
    }
    for (const id of ids.filter((one) => !followed.current.has(one))) {
      const controller = new AbortController();
      followed.current.set(id, controller);
      store.current[id] = NOTHING;
      const change = (update) => {
        if (controller.signal.aborted) return;
        store.current[id] = update(store.current[id]);
        show();
      };
      follow(id, controller.signal, (event) => change((before) => grown(before, event))).then(
        () => change((before) => ({ ...before, ended: true })),
        (error) => change((before) => ({ ...before, ended: true, error })),
      );
    }
    show();
  }, [ids.join()]);
  useEffect(
    () => () => {
      cancelAnimationFrame(frame.current);
      for (const controller of followed.current.values()) controller.abort();
    },
    [],
  );
  return known;
}

/** Names of the numbers that steps report, those that people look for first in front. */
export function metricNames(known) {
  const first = ["loss", "reward_mean", "reward", "kl", "grad_norm", "tokens_per_second", "learning_rate"];
  const found = new Set();
  for (const { points } of Object.values(known)) {
    for (const point of [points[0], points.at(-1)]) {
      for (const [name, value] of Object.entries(point ?? {})) if (typeof value === "number") found.add(name);
    }
  }
  for (const name of ["time", "step", "total_steps", "eta_seconds"]) found.delete(name);
  const rank = (name) => (first.includes(name) ? first.indexOf(name) : first.length);
  return [...found].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

/** One metric of several jobs as a plot takes it: steps, then a column of values for each job. */
export function curves(known, ids, metric) {
  const columns = ids.map((id) => new Map((known[id]?.points ?? []).map((point) => [point.step, point[metric] ?? null])));
  const steps = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
  return [steps, ...columns.map((column) => steps.map((step) => column.get(step) ?? null))];
}
