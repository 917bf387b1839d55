// An answer: its thinking folded, its tools, its tokens with their probabilities, and what can be done with it.

import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { duration, number, percent } from "../core/format.js";
import { Chip, Copy } from "./basics.js";
import { TextArea } from "./form.js";

/** How surely a token was chosen: 0 surely, 3 by chance. */
function doubt(logprob) {
  const share = Math.exp(logprob);
  return share > 0.9 ? 0 : share > 0.6 ? 1 : share > 0.25 ? 2 : 3;
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎");

function TokenCard({ token }) {
  if (!token) return html`<div class="token-card muted" role="status">Point at a token, or move with the arrow keys, to see what else could have stood there.</div>`;
  return html`
    <div class="token-card" role="status">
      <ol>
        ${token.top_logprobs.map((one) => html`<li key=${one.token}><code>${visible(one.token)}</code><i style=${{ width: `${100 * Math.exp(one.logprob)}%` }}></i><span class="num">${percent(Math.exp(one.logprob), 1)}</span></li>`)}
      </ol>
      ${!token.top_logprobs.some((one) => one.token === token.token) && html`<p>Drawn: <code>${visible(token.token)}</code> ${percent(Math.exp(token.logprob), 2)}</p>`}
    </div>
  `;
}

function Tokens({ tokens }) {
  const [chosen, setChosen] = useState(null);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setChosen((before) => Math.min(Math.max((before ?? (step > 0 ? -1 : tokens.length)) + step, 0), tokens.length - 1));
  };
  return html`
    <div class="answer-text" tabindex="0" role="group" aria-label="Tokens of the answer; arrow keys show their probabilities" onKeyDown=${move} onMouseOver=${(event) => event.target.dataset.index && setChosen(Number(event.target.dataset.index))}>
      ${tokens.map((token, index) => html`<span key=${index} data-index=${index} class=${`token sure-${doubt(token.logprob)} ${index === chosen ? "chosen" : ""}`}>${token.token}</span>`)}
    </div>
    <${TokenCard} token=${tokens[chosen]} />
  `;
}

function ToolCall({ call, answerTool }) {
  const [result, setResult] = useState("");
  const pretty = useMemo(() => {
    try {
      return JSON.stringify(JSON.parse(call.arguments), null, 2);
    } catch {
      return call.arguments;
    }
  }, [call.arguments]);
  return html`
    <div class="tool-call">
      <div class="row"><${Chip} tone="busy">tool call<//><strong>${call.name}</strong></div>
      <pre>${pretty}</pre>
      ${call.result !== undefined
        ? html`<pre>→ ${call.result}</pre>`
        : answerTool && html`<${TextArea} label="What the tool answers" rows=${2} value=${result} change=${setResult} /><div><button disabled=${!result} onClick=${() => answerTool(result)}>Go on with this</button></div>`}
    </div>
  `;
}

const Thumb = ({ down }) => html`<svg viewBox="0 0 24 24" aria-hidden="true" class=${down ? "flipped" : ""}><path d="M7 10v10H4V10zM7 10l4-7c1.7 0 2.6 1.3 2.3 3L12.7 9H19c1.3 0 2.2 1.2 1.9 2.4l-1.7 7A2 2 0 0 1 17.300 20H7" /></svg>`;

function Editor({ text, keep, cancel }) {
  const [value, setValue] = useState(text);
  return html`
    <${TextArea} label="The answer as it should be" rows=${5} value=${value} change=${setValue} autofocus />
    <div class="row"><button class="primary" disabled=${!value.trim()} onClick=${() => keep(value)}>Keep as a training example</button><button onClick=${cancel}>Cancel</button></div>
  `;
}

/** `name`: of the model that was asked. Callbacks: label(good), edit(text), prefer(), again(), answerTool(index, text). */
export function Answer({ answer, name, preferred, rivals, label, edit, prefer, again, answerTool }) {
  const [editing, setEditing] = useState(false);
  const busy = !answer.done;
  const text = answer.edited ?? answer.text;
  const showsTokens = answer.tokens.length > 0 && answer.edited === null;
  const speed = answer.usage && answer.seconds > answer.first ? answer.usage.completion_tokens / answer.seconds : null;
  return html`
    <article class=${`card answer ${preferred ? "preferred" : ""}`} aria-label=${`Answer of ${name}`} aria-busy=${busy}>
      <header class="row spread">
        <strong class="mono">${answer.version ?? name}</strong>
        <span class="row">${answer.edited !== null && html`<${Chip} tone="good">corrected<//>`}${preferred && html`<${Chip} tone="good">preferred<//>`}${answer.finish === "length" && html`<${Chip} tone="bad">cut at its limit<//>`}${answer.finish === "stopped" && !answer.error && html`<${Chip}>stopped<//>`}</span>
      </header>
      ${answer.thinking && html`<details><summary>Thinking${busy && !answer.text ? " …" : ""}</summary><div class="thinking">${answer.thinking}</div></details>`}
      ${editing
        ? html`<${Editor} text=${text} cancel=${() => setEditing(false)} keep=${(value) => { setEditing(false); edit(value); }} />`
        : showsTokens
          ? html`<${Tokens} tokens=${answer.tokens} />`
          : html`<div class=${`answer-text ${busy ? "cursor" : ""}`}>${text}</div>`}
      ${answer.tools.map((call, index) => html`<${ToolCall} key=${call.id} call=${call} answerTool=${answer.done && ((result) => answerTool(index, result))} />`)}
      ${answer.error && html`<p class="failure" role="alert">${answer.error}</p>`}
      ${answer.done && !editing && html`
        <footer class="answer-foot">
          <button class="quiet icon" aria-label="Good answer" aria-pressed=${answer.label === true} onClick=${() => label(true)}><${Thumb} /></button>
          <button class="quiet icon" aria-label="Bad answer" aria-pressed=${answer.label === false} onClick=${() => label(false)}><${Thumb} down /></button>
          <button class="quiet" onClick=${() => setEditing(true)}>Correct</button>
          ${rivals && html`<button class="quiet" aria-pressed=${preferred} onClick=${prefer}>Prefer this</button>`}
          <button class="quiet" onClick=${again}>Ask again</button>
          <${Copy} text=${text} />
          <span class="muted">${number(answer.usage?.completion_tokens)} tokens · first after ${duration(answer.first)}${speed ? ` · ${number(speed)}/s` : ""}</span>
        </footer>`}
    </article>
  `;
}
