// LangChain's chat models for both APIs: a tool loop by hand, as its agents do it. Prints a JSON object.
import { appendFileSync } from "node:fs";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";

const [url, model, file] = process.argv.slice(2);
const openai = { model, temperature: 0, maxRetries: 0, apiKey: "none", configuration: { baseURL: `${url}/v1` } };
const SCHEMA = {
  type: "object",
  properties: { minutes: { type: "integer" } },
  required: ["minutes"],
};
const models = {
  chat: new ChatOpenAI(openai),
  responses: new ChatOpenAI({ ...openai, useResponsesApi: true }),
  anthropic: new ChatAnthropic({ model, temperature: 0, maxTokens: 100, maxRetries: 0, apiKey: "none", anthropicApiUrl: url }),
};
const set_timer = tool(
  ({ minutes }) => {
    appendFileSync(file, `${minutes}\n`);
    return '{"ok": true}';
  },
  { name: "set_timer", description: "Set a timer.", schema: SCHEMA },
);
const found = {};
for (const [way, model] of Object.entries(models)) {
  const bound = model.bindTools([set_timer]);
  const messages = [new HumanMessage("Set a timer for 89 minutes.")];
  let answer = await bound.invoke(messages);
  for (let step = 0; answer.tool_calls.length > 0 && step < 4; step++) {
    messages.push(answer);
    for (const call of answer.tool_calls) messages.push(await set_timer.invoke(call));
    answer = await bound.invoke(messages);
  }
  let streamed = "";
  for await (const piece of await bound.stream(messages)) streamed += piece.text;
  found[way] = { text: answer.text, streamed };
}
console.log(JSON.stringify(found));
