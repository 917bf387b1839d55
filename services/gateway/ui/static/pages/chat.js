// Chat: one model, or two side by side, and the examples that its reader makes of their answers.

import { html, useContext, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { choices } from "../core/adapters.js";
import { call, get } from "../core/api.js";
import { EMPTY_ANSWER, messagesOf, requestBody, stream } from "../core/chat_stream.js";
import { corrected, labelled, preferred } from "../core/examples.js";
import { Session, useLoaded, useTabState } from "../core/hooks.js";
import { Answer } from "../parts/answer.js";
import { Empty, Failure, Page } from "../parts/basics.js";
import { Examples, SAMPLING, Sampling } from "../parts/chat_side.js";
import { toast } from "../parts/dialogs.js";
import { Check, Select } from "../parts/form.js";

/** Models that can be asked: the base, what is attached, and versions of adapters. */
async function loadModels() {
  const [models, versions] = await Promise.all([get("/v1/models"), choices()]);
  const [base] = models.data;
  return [
    [base.id, `${base.id} (${base.adapter ?? "base"} answers)`],
    ["base", "base, without adapter"],
    ...versions.map((id) => [id, id === base.adapter ? `${id} (attached)` : id]),
  ];
}

/** `model` of a request, and `adapter` where the base itself is asked. */
const asked = (name, served) => (name === "base" ? { model: served, adapter: "base" } : { model: name });

/** The conversation in front of a turn: of each turn the preferred answer, else the first. */
function before(turns, index) {
  return turns.slice(0, index).flatMap((turn) => [
    ...(turn.user === null ? [] : [{ role: "user", content: turn.user }]),
    ...messagesOf(turn.answers[turn.preferred ?? 0]),
  ]);
}

function parseTools(text) {
  if (!text.trim()) return [];
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new Error("the tools are no list");
  return tools;
}

function Composer({ send, stop, busy, fieldRef }) {
  const [text, setText] = useState("");
  const submit = (event) => {
    event?.preventDefault();
    if (!text.trim() || busy) return;
    send(text);
    setText("");
  };
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`
    <form class="composer" onSubmit=${submit}>
      <div class="row">
        <textarea class="grow" ref=${fieldRef} aria-label="Message" rows="2" placeholder="Ask something. Enter sends, Shift+Enter makes a new line." value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${key}></textarea>
        ${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" type="submit" disabled=${!text.trim()}>Send</button>`}
      </div>
    </form>
  `;
}

/** Tells the server what is said of an answer: all of it, in the place of what was said before. */
async function tell(answer, rival) {
  const said = {
    thumb: { true: "up", false: "down" }[answer.label],
    correction: answer.edited ?? undefined,
    preferred_over: rival?.id ?? undefined,
  };
  try {
    await call("POST", "/v1/feedback", { json: { completion_id: answer.id, ...said } });
  } catch (error) {
    toast(`Not kept as feedback: ${error.message}`, { tone: "bad" });
  }
}

/** Turns, their answers, and everything that changes them. */
function useConversation({ models, served, sampling, logprobs, tools, collect }) {
  const [turns, setTurns] = useState([]);
  const [busy, setBusy] = useState(false);
  const running = useRef(null);
  const told = useRef(Promise.resolve());
  const give = (answer, rival = null) => {
    told.current = told.current.then(() => tell(answer, rival)); // one after the other: the last one counts
  };
  useEffect(() => () => running.current?.abort(), []);

  const setAnswer = (turn, place, change) =>
    setTurns((known) =>
      known.map((one, index) =>
        index !== turn ? one : { ...one, answers: one.answers.map((answer, other) => (other === place ? change(answer) : answer)) },
      ),
    );

  const ask = async (known, index) => {
    let offered;
    try {
      offered = parseTools(tools);
    } catch (error) {
      toast(`Tools: ${error.message}`, { tone: "bad" });
      return;
    }
    const turn = known[index];
    const messages = [...before(known, index), ...(turn.user === null ? [] : [{ role: "user", content: turn.user }])];
    setTurns(known);
    setBusy(true);
    running.current = new AbortController();
    await Promise.all(
      turn.names.map((name, place) => {
        const body = { ...requestBody({ messages, sampling, logprobs, tools: offered }), ...asked(name, served) };
        return stream(body, running.current.signal, (answer) => setAnswer(index, place, () => answer));
      }),
    );
    setBusy(false);
  };
  const fresh = (user) => ({ user, names: models, answers: models.map(() => EMPTY_ANSWER), preferred: null });
  const context = (index) => [
    ...(sampling.system ? [{ role: "system", content: sampling.system }] : []),
    ...before(turns, index),
    ...(turns[index].user === null ? [] : [{ role: "user", content: turns[index].user }]),
  ];
  return {
    turns, busy,
    send: (user) => ask([...turns, fresh(user)], turns.length),
    again: (index) => ask([...turns.slice(0, index), fresh(turns[index].user)], index),
    stop: () => running.current?.abort(),
    clear: () => {
      running.current?.abort();
      setTurns([]);
    },
    label: (index, place, good) => {
      const answer = turns[index].answers[place];
      setAnswer(index, place, (one) => ({ ...one, label: good }));
      give({ ...answer, label: good });
      collect(labelled(context(index), answer.edited ?? answer.text, good));
    },
    edit: (index, place, text) => {
      const answer = turns[index].answers[place];
      setAnswer(index, place, (one) => ({ ...one, edited: text }));
      give({ ...answer, edited: text });
      collect(corrected(context(index), answer.text, text));
    },
    prefer: (index, place) => {
      const turn = turns[index];
      setTurns((known) => known.map((one, other) => (other === index ? { ...one, preferred: place } : one)));
      const rival = turn.answers[1 - place];
      give(turn.answers[place], rival);
      collect(preferred(context(index), turn.answers[place].text, rival.text));
    },
    answerTool: (index, place, call, result) => {
      const known = turns.map((turn, at) =>
        at !== index ? turn : { ...turn, preferred: place, answers: turn.answers.map((answer, other) => (other !== place ? answer : { ...answer, tools: answer.tools.map((one, number) => (number === call ? { ...one, result } : one)) })) },
      );
      const waits = known[index].answers[place].tools.some((one) => one.result === undefined);
      if (waits) setTurns(known);
      else ask([...known, { ...fresh(null), names: [known[index].names[place]], answers: [EMPTY_ANSWER] }], known.length);
    },
  };
}

function Turn({ turn, index, chat }) {
  return html`
    ${turn.user !== null && html`<p class="asked">${turn.user}</p>`}
    <div class="answers">
      ${turn.answers.map((answer, place) => html`
        <${Answer} key=${place} answer=${answer} name=${turn.names[place]} preferred=${turn.preferred === place} rivals=${turn.answers.length > 1}
          label=${(good) => chat.label(index, place, good)} edit=${(text) => chat.edit(index, place, text)} prefer=${() => chat.prefer(index, place)}
          again=${() => chat.again(index)} answerTool=${(call, result) => chat.answerTool(index, place, call, result)} />`)}
    </div>
  `;
}

/** A new example of the same answer takes the place of the one before. */
function withExample(examples, example) {
  const prompt = JSON.stringify(example.before);
  const original = example.kind === "corrected" ? example.rejected : example.text;
  const others = examples.filter((one) => JSON.stringify(one.before) !== prompt || ![one.text, one.rejected].includes(original) || one.kind === "preferred" !== (example.kind === "preferred"));
  return [...others, example];
}

export default function Chat({ query }) {
  const session = useContext(Session);
  const models = useLoaded(loadModels, []);
  const [left, setLeft] = useState(query.get("model") ?? session.model);
  const [right, setRight] = useState(query.get("beside") ?? "base");
  const [two, setTwo] = useState(query.has("beside"));
  const [sampling, setSampling] = useTabState("sampling", SAMPLING);
  const [logprobs, setLogprobs] = useTabState("logprobs", false);
  const [tools, setTools] = useTabState("tools", "");
  const [examples, setExamples] = useTabState("examples", []);
  const field = useRef(null);
  const collect = (example) => setExamples((known) => withExample(known, example));
  const chat = useConversation({ models: two ? [left, right] : [left], served: session.model, sampling, logprobs, tools, collect });
  const options = models.data ?? [[session.model, session.model], ["base", "base"]];
  const known = (name) => (options.some(([id]) => id === name) ? options : [...options, [name, name]]);
  return html`
    <${Page} title="Chat" actions=${html`<button onClick=${() => { chat.clear(); field.current?.focus(); }} disabled=${!chat.turns.length}>New chat</button>`}>
      <div class="chat">
        <div class="stacked">
          <div class="card fields">
            <${Select} label=${two ? "Left" : "Who answers"} value=${left} change=${setLeft} options=${known(left)} />
            ${two && html`<${Select} label="Right" value=${right} change=${setRight} options=${known(right)} />`}
            <${Check} label="Two side by side" checked=${two} change=${setTwo} />
          </div>
          ${models.error && html`<${Failure} error=${models.error} retry=${models.reload} />`}
          <div class="turns" aria-live="polite" aria-relevant="additions">
            ${chat.turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} index=${index} chat=${chat} />`)}
            ${!chat.turns.length && html`<${Empty} title="Ask the model something">Answers stream in. Correct them or compare two versions, and train on what you found.<//>`}
          </div>
          <${Composer} send=${chat.send} stop=${chat.stop} busy=${chat.busy} fieldRef=${field} />
        </div>
        <aside class="side" aria-label="Examples and sampling">
          <${Examples} examples=${examples} change=${setExamples} model=${left} />
          <${Sampling} sampling=${sampling} change=${setSampling} tools=${tools} changeTools=${setTools} logprobs=${logprobs} changeLogprobs=${setLogprobs} />
        </aside>
      </div>
    <//>
  `;
}
