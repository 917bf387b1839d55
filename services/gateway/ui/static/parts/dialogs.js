// Dialogs that ask before something happens, and short messages of what has happened.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { TextField } from "./form.js";

const asks = new Set();
const toasts = new Set();

/** A dialog with a native focus trap; closes with Escape. */
export function Dialog({ title, close, children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before instanceof HTMLElement && before.focus();
  }, []);
  return html`
    <dialog ref=${element} aria-label=${title} onCancel=${(event) => { event.preventDefault(); close(); }}>
      <header class="card-head"><h2>${title}</h2><button class="quiet icon" aria-label="Close" onClick=${close}>✕</button></header>
      ${children}
    </dialog>
  `;
}

/** Asks before something that cannot be taken back, or that others notice. Resolves to whether it was agreed to.
 *  `word`: has to be typed first. */
export function confirmed({ title, body, action, word = null, danger = true }) {
  return new Promise((resolve) => asks.forEach((ask) => ask({ title, body, action, word, danger, resolve })));
}

export function toast(message, { tone = "good", href = null, linkText = "Show" } = {}) {
  toasts.forEach((show) => show({ id: crypto.randomUUID?.() ?? String(Math.random()), message, tone, href, linkText }));
}

/** Runs something that a click asks for: its error becomes a message, and `done` one of success. */
export async function attempt(work, done) {
  try {
    const result = await work();
    if (done) toast(typeof done === "function" ? done(result) : done);
    return result;
  } catch (error) {
    toast(error.message, { tone: "bad" });
    return undefined;
  }
}

function Question({ question, answer }) {
  const [typed, setTyped] = useState("");
  const ready = question.word === null || typed === question.word;
  return html`
    <${Dialog} title=${question.title} close=${() => answer(false)}>
      <div class="dialog-body">${question.body}</div>
      ${question.word !== null && html`<${TextField} label=${html`Type <code>${question.word}</code> to go on`} value=${typed} change=${setTyped} autocomplete="off" />`}
      <footer class="row end">
        <button onClick=${() => answer(false)}>Keep everything as it is</button>
        <button class=${question.danger ? "danger" : "primary"} disabled=${!ready} onClick=${() => answer(true)}>${question.action}</button>
      </footer>
    <//>
  `;
}

const TOAST_SECONDS = 6;

/** Where questions and messages appear; once in the application. */
export function Dialogs() {
  const [question, setQuestion] = useState(null);
  const [shown, setShown] = useState([]);
  useEffect(() => {
    const show = (message) => {
      setShown((before) => [...before.slice(-3), message]);
      const away = () => setShown((before) => before.filter((one) => one.id !== message.id));
      setTimeout(away, (message.tone === "bad" ? 2 : 1) * TOAST_SECONDS * 1000);
    };
    asks.add(setQuestion);
    toasts.add(show);
    return () => {
      asks.delete(setQuestion);
      toasts.delete(show);
    };
  }, []);
  const answer = (agreed) => {
    question.resolve(agreed);
    setQuestion(null);
  };
  return html`
    ${question && html`<${Question} question=${question} answer=${answer} />`}
    <div class="toasts" role="status" aria-live="polite">
      ${shown.map((one) => html`<p key=${one.id} class=${`toast ${one.tone}`}>${one.message}${one.href && html` <a href=${one.href}>${one.linkText}</a>`}</p>`)}
    </div>
  `;
}
