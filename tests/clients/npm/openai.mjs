// The unmodified `openai` of npm: what each call returned, as one JSON object on stdout.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [address] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "unused", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Name a city of France." }];
const asked = { model, messages, max_tokens: 60, temperature: 0 };
const City = z.object({ city: z.string().max(20), big: z.boolean() });
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      strict: true,
      parameters: {
        type: "object",
        properties: { city: { type: "string", maxLength: 20 } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];

const text = (await client.chat.completions.create(asked)).choices[0].message.content;

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}

const called = await client.chat.completions.create({ ...asked, tools, tool_choice: "required" });
const parsed = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(City, "city") });
const response = await client.responses.parse({
  model,
  input: messages,
  temperature: 0,
  max_output_tokens: 60,
  text: { format: zodTextFormat(City, "city") },
});

let error = {};
try {
  const schema = { type: "strin" };
  await client.chat.completions.create({ ...asked, response_format: { type: "json_schema", json_schema: { name: "x", schema } } });
} catch (raised) {
  error = { kind: raised.constructor.name, status: raised.status, param: raised.param };
}

console.log(
  JSON.stringify({
    text,
    streamed,
    usage: usage.completion_tokens,
    call: called.choices[0].message.tool_calls[0].function,
    parsed: parsed.choices[0].message.parsed,
    response: response.output_parsed,
    error,
  }),
);
