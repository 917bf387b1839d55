// The Vercel AI SDK by all its ways to Temper: a tool loop to its end, and a second turn. Prints a JSON object.
import { appendFileSync } from "node:fs";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const [url, name, file] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const models = {
  responses: createOpenAI({ baseURL, apiKey: "none" })(name),
  chat: createOpenAI({ baseURL, apiKey: "none" }).chat(name),
  compatible: createOpenAICompatible({ name: "temper", baseURL, apiKey: "none" })(name),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })(name),
};
const set_timer = tool({
  description: "Set a timer.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { minutes: { type: "integer" } },
    required: ["minutes"],
  }),
  execute: async ({ minutes }) => {
    appendFileSync(file, `${minutes}\n`);
    return '{"ok": true}';
  },
});
const found = {};
for (const [way, model] of Object.entries(models)) {
  const settings = { model, temperature: 0, maxRetries: 0, tools: { set_timer }, stopWhen: stepCountIs(4) };
  const first = await generateText({ ...settings, prompt: "Set a timer for 89 minutes." });
  const asked = { role: "user", content: "Set a timer for 89 minutes." };
  const next = { role: "user", content: "What is 12 plus 7?" };
  const second = await generateText({
    model, temperature: 0, maxRetries: 0, messages: [asked, ...first.response.messages, next],
  });
  const streamed = streamText({ ...settings, prompt: "Set a timer for 89 minutes." });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  found[way] = { steps: first.steps.length, text: first.text, streamed: text, second: second.text };
}
console.log(JSON.stringify(found));
