// Lines of the logs of gateway and engines, followed as they are written.

import { useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { events, get } from "./api.js";

const MOST = 1000;
const FIRST = 300;
const RETRY_SECONDS = 2;
// Processes are asked one after the other: a line may come behind one that was written a little later.
const OVERLAP_SECONDS = 3;
const TYPING_SECONDS = 0.3;
const PATH = "/v1/logs";

/** Follows a log behind the lines that are there, until `signal` ends that; goes on where it was after a lost connection. */
async function follow(query, lines, signal, take) {
  let since = (lines.at(-1)?.time ?? OVERLAP_SECONDS) - OVERLAP_SECONDS;
  let known = new Set(lines.map((line) => line.id));
  for (;;) {
    try {
      for await (const { data } of events("GET", PATH, { signal, query: { ...query, since, limit: MOST, follow: true }, quiet: true })) {
        if (known.has(data.id)) continue;
        if (known.size > 5 * MOST) known = new Set([...known].slice(-MOST));
        known.add(data.id);
        since = Math.max(since, data.time - OVERLAP_SECONDS);
        take(data);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status && error.status < 500) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
    if (signal.aborted) return;
  }
}

/** Lines that a query finds, and whose there are: {lines, processes, unreachable, error, loading}; new lines as long as they are followed. */
export function useProcessLogs(query, followed) {
  const [state, setState] = useState({ lines: [], processes: [], unreachable: [], error: null, loading: true });
  const frame = useRef(0);
  useEffect(() => {
    const controller = new AbortController();
    const { signal } = controller;
    let lines = [];
    const show = () => {
      frame.current = 0;
      if (!signal.aborted) setState((known) => ({ ...known, lines, error: null, loading: false }));
    };
    const take = (line) => {
      lines = [...lines.slice(-MOST + 1), line];
      frame.current ||= requestAnimationFrame(show);
    };
    const failed = (error) => signal.aborted || setState((known) => ({ ...known, lines, error, loading: false }));
    const begin = async () => {
      // What is there is told at once, so that an empty log is known to be one.
      const found = await get(PATH, { ...query, limit: FIRST }, { signal, quiet: true });
      lines = found.data;
      if (!signal.aborted) setState((known) => ({ ...known, processes: found.processes, unreachable: found.unreachable }));
      show();
      if (followed) await follow(query, lines, signal, take);
    };
    const timer = setTimeout(() => begin().catch(failed), TYPING_SECONDS * 1000);
    return () => {
      clearTimeout(timer);
      cancelAnimationFrame(frame.current);
      frame.current = 0;
      controller.abort();
    };
  }, [JSON.stringify(query), followed]);
  return state;
}
