// One streamed answer of POST /v1/chat/completions, as it grows.

import { ApiError, events } from "./api.js";

export const EMPTY_ANSWER = {
  text: "", thinking: "", tools: [], tokens: [], done: false, error: null, finish: null, version: null, id: null,
  first: null, seconds: null, usage: null, edited: null, label: null,
};

/** Body of a request: only what was set. */
export function requestBody({ model, messages, sampling, logprobs, tools }) {
  const { system, effort, stop, ...numbers } = sampling;
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [name, value] of Object.entries(numbers)) if (value !== "" && value !== undefined) body[name] = Number(value);
  if (effort) body.reasoning_effort = effort;
  if (stop) body.stop = stop.split("\n").filter(Boolean).slice(0, 4);
  if (logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (tools.length) body.tools = tools;
  return body;
}

function withCalls(known, deltas) {
  const calls = known.map((call) => ({ ...call }));
  for (const delta of deltas) {
    const call = (calls[delta.index] ??= { id: "", name: "", arguments: "" });
    call.id = delta.id ?? call.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }
  return calls;
}

function grown(answer, chunk, began) {
  const next = { ...answer, id: chunk.id, version: chunk.adapter ?? answer.version };
  if (chunk.usage) next.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return next;
  const { delta } = choice;
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) next.thinking += thought;
  if (delta.content) next.text += delta.content;
  if (delta.tool_calls) next.tools = withCalls(next.tools, delta.tool_calls);
  if (choice.logprobs?.content) next.tokens = [...next.tokens, ...choice.logprobs.content];
  if (next.first === null && (thought || delta.content || delta.tool_calls)) next.first = (performance.now() - began) / 1000;
  if (choice.finish_reason) next.finish = choice.finish_reason;
  return next;
}

/** Streams an answer; `change` gets it at most once a frame, and at its end. */
export async function stream(body, signal, change) {
  const began = performance.now();
  let answer = EMPTY_ANSWER;
  let frame = 0;
  const show = () => {
    frame = 0;
    change(answer);
  };
  try {
    for await (const { data } of events("POST", "/v1/chat/completions", { json: body, signal })) {
      if (data.error) throw new ApiError(200, data.error);
      answer = grown(answer, data, began);
      frame ||= requestAnimationFrame(show);
    }
    if (answer.finish === null) throw new ApiError(0, { message: "The server ended the answer before it was whole." });
  } catch (error) {
    answer = { ...answer, error: error.name === "AbortError" ? null : error.message, finish: answer.finish ?? "stopped" };
  }
  cancelAnimationFrame(frame);
  answer = { ...answer, done: true, seconds: (performance.now() - began) / 1000 };
  change(answer);
  return answer;
}

/** The messages that an answer becomes in the conversation that follows it. */
export function messagesOf(answer) {
  const content = answer.edited ?? answer.text;
  if (!answer.tools.length || answer.edited !== null) return [{ role: "assistant", content }];
  const calls = answer.tools.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  const results = answer.tools
    .filter((call) => call.result !== undefined)
    .map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }));
  return [{ role: "assistant", content: content || null, tool_calls: calls }, ...results];
}
