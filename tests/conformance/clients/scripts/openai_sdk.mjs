// The openai package for node: its tool runner, and a conversation of two responses. Prints a JSON object.
import { appendFileSync } from "node:fs";
import OpenAI from "openai";

const [url, model, file] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const set_timer = {
  type: "function",
  function: {
    name: "set_timer",
    description: "Set a timer.",
    parameters: { type: "object", properties: { minutes: { type: "integer" } }, required: ["minutes"] },
    parse: JSON.parse,
    function: ({ minutes }) => {
      appendFileSync(file, `${minutes}\n`);
      return '{"ok": true}';
    },
  },
};
const messages = [{ role: "user", content: "Set a timer for 89 minutes." }];
const asked = { model, temperature: 0, messages, tools: [set_timer] };
const text = await client.chat.completions.runTools(asked).finalContent();
const streamed = await client.chat.completions.runTools({ ...asked, stream: true }).finalContent();
const first = await client.responses.create({ model, temperature: 0, input: "What is 12 plus 7?" });
const second = await client.responses.create({
  model, temperature: 0, input: "What is 1 plus 2?", previous_response_id: first.id,
});
console.log(JSON.stringify({ runner: { text, streamed, first: first.output_text, second: second.output_text } }));
