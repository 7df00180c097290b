// Vercel's unmodified `ai`, with one of its providers: what each call returned, as one JSON object on stdout.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { z } from "zod";

const [address, name, provider] = process.argv.slice(2);
const baseURL = `http://${address}/v1`;
const model = {
  compatible: () => createOpenAICompatible({ name: "lockstep", baseURL, includeUsage: true, supportsStructuredOutputs: true })(name),
  chat: () => createOpenAI({ baseURL, apiKey: "unused" }).chat(name),
  responses: () => createOpenAI({ baseURL, apiKey: "unused" }).responses(name),
}[provider]();
const asked = { model, prompt: "Name a city of France.", temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const City = z.object({ city: z.string().max(20), big: z.boolean() });
const weather = tool({ inputSchema: z.object({ city: z.string().max(20) }) });

const whole = await generateText(asked);
const stream = streamText(asked);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
const called = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
const parsed = await generateText({ ...asked, output: Output.object({ schema: City }) });

let error = {};
try {
  await generateText({ ...asked, output: Output.object({ schema: jsonSchema({ type: "object", properties: { a: { type: "strin" } } }) }) });
} catch (raised) {
  error = { kind: raised.name, status: raised.statusCode, message: raised.message };
}

console.log(
  JSON.stringify({
    text: whole.text,
    streamed,
    usage: (await stream.usage).outputTokens,
    call: { name: called.toolCalls[0].toolName, input: called.toolCalls[0].input },
    parsed: parsed.output,
    error,
  }),
);
