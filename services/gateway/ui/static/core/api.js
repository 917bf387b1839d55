// Client of Temper's public API. Every request of the dashboard goes through here.
//
// The key is kept in this module, and in sessionStorage if its owner asks for that: it leaves with the tab. It is only
// ever sent as an Authorization header, which no other site can make a browser add.

const ROOT = new URL("..", document.baseURI);
const STORED = "temper.key";
const LOG_LENGTH = 500;
const PAGE = 100; // rows of a list that every route gives at once
const LOST = "The connection was lost before the answer's end.";

const HANDED_OVER = "temper.key.once";

let key = sessionStorage.getItem(STORED) ?? "";
if (sessionStorage.getItem(HANDED_OVER)) [STORED, HANDED_OVER].forEach((name) => sessionStorage.removeItem(name));
let refused = null; // the error of a request that was answered 401, until there is another key
const listeners = { unauthorized: new Set(), call: new Set() };

/** Calls of this page, newest last: what "Events and logs" shows of the dashboard itself. */
export const calls = [];

export class ApiError extends Error {
  constructor(status, { message, code = null, param = null }) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

export const hasKey = () => key !== "";

export function setKey(value, { keep = false } = {}) {
  key = value.trim();
  if (key) refused = null;
  if (keep && key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

/** Loads the dashboard anew, so that nothing is left of what an earlier key has shown; the key of now outlives that. */
export function startAnew() {
  if (key && !sessionStorage.getItem(STORED)) {
    sessionStorage.setItem(STORED, key);
    sessionStorage.setItem(HANDED_OVER, "1");
  }
  location.reload();
}

/** Calls `listener` at every "unauthorized" answer or ended "call"; returns a function that ends that. */
export function on(event, listener) {
  listeners[event].add(listener);
  return () => listeners[event].delete(listener);
}

const tell = (event, value) => listeners[event].forEach((listener) => listener(value));

function address(path, query) {
  const url = new URL(path.replace(/^\//, ""), ROOT);
  for (const [name, value] of Object.entries(query ?? {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") url.searchParams.append(name, one);
    }
  }
  return url;
}

function headersOf(given, hasJson) {
  const headers = { ...given };
  if (key) headers.authorization = `Bearer ${key}`;
  if (hasJson) headers["content-type"] = "application/json";
  return headers;
}

function record(method, path, status, began) {
  calls.push({ time: Date.now() / 1000, method, path, status, ms: performance.now() - began });
  if (calls.length > LOG_LENGTH) calls.shift();
  tell("call", calls.at(-1));
}

async function failure(response) {
  let described;
  try {
    described = (await response.json()).error;
  } catch {
    described = { message: `the server answered ${response.status} ${response.statusText}` };
  }
  const error = new ApiError(response.status, described);
  if (response.status === 401) {
    refused = error;
    tell("unauthorized", error);
  }
  return error;
}

/** The response of a call that has succeeded; throws ApiError, or the AbortError of `signal`. */
export async function call(method, path, { json, body, query, headers, signal, quiet = false } = {}) {
  if (refused && !key) throw refused; // pages behind the sign-in go on asking: the gateway need not hear it
  const began = performance.now();
  const sent = json === undefined ? body : JSON.stringify(json);
  let response;
  try {
    response = await fetch(address(path, query), {
      method,
      body: sent,
      headers: headersOf(headers, json !== undefined),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    record(method, path, 0, began);
    throw new ApiError(0, { message: "Temper cannot be reached. Is the gateway running, and is this machine online?" });
  }
  if (!quiet || !response.ok) record(method, path, response.status, began);
  if (!response.ok) throw await failure(response);
  return response;
}

export const get = async (path, query, options) => (await call("GET", path, { query, ...options })).json();
export const post = async (path, json = {}, options) => (await call("POST", path, { json, ...options })).json();
export const remove = async (path, options) => (await call("DELETE", path, options)).json();

/** Sends a large JSON body, or a form; `progress` gets the share that has been sent. */
export function upload(path, body, progress = () => {}) {
  const began = performance.now();
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", address(path));
    const json = !(body instanceof FormData);
    for (const [name, value] of Object.entries(headersOf({}, json))) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onerror = () => reject(new ApiError(0, { message: "the connection was lost while the data was sent" }));
    request.onload = async () => {
      record("POST", path, request.status, began);
      const response = new Response(request.responseText, { status: request.status, statusText: request.statusText });
      if (response.ok) resolve(await response.json());
      else reject(await failure(response));
    };
    request.send(json ? JSON.stringify(body) : body);
  });
}

/** Events of a stream as {event, id, data}, data parsed; ends with the stream, or at [DONE]. Throws ApiError where the
 *  connection is lost. */
export async function* events(method, path, options) {
  const response = await call(method, path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () =>
    reader.read().catch((error) => {
      throw options?.signal?.aborted ? error : new ApiError(0, { message: LOST });
    });
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const found = parseEvent(block);
        if (found === null) continue;
        if (found.data === "[DONE]") return;
        yield { ...found, data: JSON.parse(found.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  const found = { event: "message", id: null, data: [] };
  for (const line of block.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") found.data.push(value);
    else if (name in found) found[name] = value;
  }
  return found.data.length ? { ...found, data: found.data.join("\n") } : null;
}

/** The first `most` objects of a list, page by page, and whether there are more: {data, more, unreadable}. */
export async function list(path, query, most, options) {
  const found = [], unreadable = new Map();
  for (;;) {
    const limit = Math.min(PAGE, most + 1 - found.length);
    const page = await get(path, { ...query, limit, after: found.at(-1)?.id }, options);
    found.push(...page.data);
    for (const one of page.unreadable ?? []) unreadable.set(one.id, one);
    if (page.data.length < limit || found.length > most) {
      return { data: found.slice(0, most), more: found.length > most, unreadable: [...unreadable.values()] };
    }
  }
}

/** Fetches a file with the key and gives it to the browser to keep. */
export async function save(path, name, query) {
  const response = await call("GET", path, { query });
  keepFile(await response.blob(), name);
}

export function keepFile(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
