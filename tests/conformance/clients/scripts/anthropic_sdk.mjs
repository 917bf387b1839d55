// The @anthropic-ai/sdk package: its tool runner, whole and streamed. Prints a JSON object.
import { appendFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [url, model, file] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const set_timer = betaTool({
  name: "set_timer",
  description: "Set a timer.",
  inputSchema: {
    type: "object",
    properties: { minutes: { type: "integer" } },
    required: ["minutes"],
  },
  run: ({ minutes }) => {
    appendFileSync(file, `${minutes}\n`);
    return '{"ok": true}';
  },
});
const messages = [{ role: "user", content: "Set a timer for 89 minutes." }];
const asked = { model, max_tokens: 100, temperature: 0, messages, tools: [set_timer] };
const said = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
const text = said(await client.beta.messages.toolRunner(asked));
let streamed = "";
for await (const stream of client.beta.messages.toolRunner({ ...asked, stream: true })) {
  streamed = said(await stream.finalMessage());
}
console.log(JSON.stringify({ runner: { text, streamed } }));
