// Fields of forms: a label, a control, and what it means.

import { html, useState } from "../vendor/htm-preact.js";

let made = 0;
/** An id for an element of a component, the same as long as that lives. */
const useId = () => useState(() => `field-${(made += 1)}`)[0];

/** `children` gets the attributes that tie a control to its label and hint. */
function Field({ label, hint, children }) {
  const id = useId();
  const described = hint ? `${id}-hint` : undefined;
  return html`
    <div class="field">
      <label for=${id}>${label}</label>
      ${children({ id, "aria-describedby": described })}
      ${hint && html`<small class="muted" id=${described}>${hint}</small>`}
    </div>
  `;
}

export function TextField({ label, hint, value, change, type = "text", ...rest }) {
  return html`<${Field} label=${label} hint=${hint}>${(tied) => html`<input type=${type} value=${value} onInput=${(event) => change(event.target.value)} ...${rest} ...${tied} />`}<//>`;
}

/** `pick` gets the chosen file, or null. */
export function FileField({ label, hint, pick, ...rest }) {
  return html`<${Field} label=${label} hint=${hint}>${(tied) => html`<input type="file" onChange=${(event) => pick(event.target.files[0] ?? null)} ...${rest} ...${tied} />`}<//>`;
}

export function NumberField({ label, hint, value, change, ...rest }) {
  return html`<${TextField} label=${label} hint=${hint} type="number" inputmode="decimal" step="any" value=${value} change=${change} ...${rest} />`;
}

export function TextArea({ label, hint, value, change, rows = 3, ...rest }) {
  return html`<${Field} label=${label} hint=${hint}>${(tied) => html`<textarea rows=${rows} value=${value} onInput=${(event) => change(event.target.value)} ...${rest} ...${tied}></textarea>`}<//>`;
}

/** Options are strings, or [value, text]. */
export function Select({ label, hint, value, change, options, ...rest }) {
  const entry = (option) => {
    const [own, text] = Array.isArray(option) ? option : [option, option];
    return html`<option key=${own} value=${own} selected=${own === value}>${text}</option>`;
  };
  return html`
    <${Field} label=${label} hint=${hint}>
      ${(tied) => html`<select value=${value} onChange=${(event) => change(event.target.value)} ...${rest} ...${tied}>${options.map(entry)}</select>`}
    <//>
  `;
}

export function Check({ label, checked, change, ...rest }) {
  return html`<label class="check"><input type="checkbox" checked=${checked} onChange=${(event) => change(event.target.checked)} ...${rest} /><span>${label}</span></label>`;
}

/** A number as typed, or undefined where nothing was. */
export const typedNumber = (text) => (text === "" || text === null || text === undefined ? undefined : Number(text));

/** Objects of a JSONL text; the error names the line. */
export function parseLines(text) {
  return text
    .split("\n")
    .map((line, index) => [line.trim(), index + 1])
    .filter(([line]) => line)
    .map(([line, number]) => {
      try {
        return JSON.parse(line);
      } catch (error) {
        throw new Error(`line ${number} is no JSON object: ${error.message}`);
      }
    });
}
