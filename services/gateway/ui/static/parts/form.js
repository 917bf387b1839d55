// Fields of forms: a label, a control, and what it means.

import { html } from "../vendor/htm-preact.js";

export function Field({ label, hint, children }) {
  return html`<label class="field"><span>${label}</span>${children}${hint && html`<small class="muted">${hint}</small>`}</label>`;
}

export function TextField({ label, hint, value, change, type = "text", ...rest }) {
  return html`<${Field} label=${label} hint=${hint}><input type=${type} value=${value} onInput=${(event) => change(event.target.value)} ...${rest} /><//>`;
}

export function NumberField({ label, hint, value, change, ...rest }) {
  return html`<${TextField} label=${label} hint=${hint} type="number" inputmode="decimal" step="any" value=${value} change=${change} ...${rest} />`;
}

export function TextArea({ label, hint, value, change, rows = 3, ...rest }) {
  return html`<${Field} label=${label} hint=${hint}><textarea rows=${rows} value=${value} onInput=${(event) => change(event.target.value)} ...${rest}></textarea><//>`;
}

/** Options are strings, or [value, text]. */
export function Select({ label, hint, value, change, options, ...rest }) {
  return html`
    <${Field} label=${label} hint=${hint}>
      <select value=${value} onChange=${(event) => change(event.target.value)} ...${rest}>
        ${options.map((option) => {
          const [own, text] = Array.isArray(option) ? option : [option, option];
          return html`<option value=${own} selected=${own === value}>${text}</option>`;
        })}
      </select>
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
