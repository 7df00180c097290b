// The unmodified `@anthropic-ai/sdk` of npm: what each call returned, as one JSON object on stdout.
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const [address, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: `http://${address}`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a city of France." }];
const asked = { model, messages, max_tokens: 60, temperature: 0 };
const City = z.object({ city: z.string().max(20), big: z.boolean() });
const input_schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
};

const whole = await client.messages.create(asked);
const stream = client.messages.stream(asked);
let streamed = "";
stream.on("text", (piece) => {
  streamed += piece;
});
const final = await stream.finalMessage();
const called = await client.messages.create({
  ...asked,
  tools: [{ name: "weather", input_schema }],
  tool_choice: { type: "any" },
});
const parsed = await client.messages.parse({ ...asked, output_config: { format: zodOutputFormat(City) } });

let error = {};
try {
  await client.messages.create({ ...asked, tools: [{ name: "f", input_schema: { type: "object", properties: { a: { type: "strin" } } } }] });
} catch (raised) {
  error = { kind: raised.constructor.name, status: raised.status, message: raised.error.error.message };
}

console.log(
  JSON.stringify({
    text: whole.content[0].text,
    streamed,
    usage: final.usage.output_tokens,
    call: called.content.find((block) => block.type === "tool_use"),
    parsed: parsed.parsed_output,
    error,
  }),
);
