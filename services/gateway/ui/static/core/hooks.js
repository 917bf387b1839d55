// Hooks that pages share: what is loaded, what is asked again and again, where the reader is, what its key may do.

import { createContext, useCallback, useContext, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { list } from "./api.js";

const ROWS = 100;

/** Scopes of the caller and the model's name: {scopes, required, caller, model, refresh}. */
export const Session = createContext(null);

/** True if the caller has one of these scopes. */
export function useMay(...scopes) {
  const session = useContext(Session);
  return scopes.some((scope) => session.scopes.includes(scope));
}

/** What `load` returns, with its error and a way to load again. It loads anew when one of `inputs` changes. */
export function useLoaded(load, inputs) {
  const [state, setState] = useState({ data: undefined, error: null, loading: true });
  const current = useRef(0);
  const again = useCallback(async () => {
    const turn = (current.current += 1);
    setState((before) => ({ ...before, loading: true }));
    try {
      const data = await load();
      if (turn === current.current) setState({ data, error: null, loading: false });
    } catch (error) {
      if (turn === current.current) setState((before) => ({ ...before, error, loading: false }));
    }
  }, inputs);
  useEffect(() => {
    again();
    return () => {
      current.current += 1;
    };
  }, [again]);
  return { ...state, reload: again };
}

/** Loads again every `seconds` while the page is visible; 0: not any more. */
export function usePolled(load, seconds, inputs = []) {
  const loaded = useLoaded(load, inputs);
  const { reload } = loaded;
  useEffect(() => {
    if (!seconds) return undefined;
    let stopped = false;
    let timer;
    const next = async () => {
      if (!document.hidden) await reload();
      if (!stopped) timer = setTimeout(next, seconds * 1000);
    };
    timer = setTimeout(next, seconds * 1000);
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, [reload, seconds]);
  return loaded;
}

/** Rows of a list: {data: {data, more}, …}, loaded as usePolled does; `showMore` makes it longer where `data.more` says that there are more. */
export function useList(path, query, seconds) {
  const [most, setMost] = useState(ROWS);
  const load = () => list(path, query, most, { quiet: true });
  const state = usePolled(load, seconds, [path, JSON.stringify(query), most]);
  return { ...state, showMore: () => setMost(most + ROWS) };
}

/** A part of an address as it was meant, or as it stands where somebody has typed what means nothing. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const parsed = () => {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(search) };
};

/** Where the reader is: #/jobs/job-1?x=y → {parts: ["jobs", "job-1"], query}. */
export function useRoute() {
  const [route, setRoute] = useState(parsed);
  useEffect(() => {
    const changed = () => setRoute(parsed());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export function go(...parts) {
  location.hash = link(...parts);
}

const TAB_STATE = "temper.tab.";

/** State that lives in sessionStorage under a name, for this tab only. */
export function useTabState(name, initial) {
  const stored = TAB_STATE + name;
  const [value, setValue] = useState(() => {
    try {
      const text = sessionStorage.getItem(stored);
      return text === null ? initial : JSON.parse(text);
    } catch {
      return initial;
    }
  });
  const change = useCallback(
    (next) =>
      setValue((before) => {
        const after = typeof next === "function" ? next(before) : next;
        try {
          sessionStorage.setItem(stored, JSON.stringify(after));
        } catch {
          // Full: the value stays in memory, and leaves with the page.
        }
        return after;
      }),
    [stored],
  );
  return [value, change];
}

/** Forgets the state of all names. */
export function clearTabState() {
  const names = Array.from({ length: sessionStorage.length }, (_, index) => sessionStorage.key(index));
  names.filter((name) => name.startsWith(TAB_STATE)).forEach((name) => sessionStorage.removeItem(name));
}
