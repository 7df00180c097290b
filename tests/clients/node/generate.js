// A client that shares no code with the server: @grpc/grpc-js over the .proto file.
//
//   node generate.js ADDRESS SCHEMA_FILE PROMPT [MAX_TOKENS]
//
// Prints one JSON object a line: every delta, as it arrives, and at the end the whole answer. Exits 1 on any gRPC error.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

function main([address, schemaFile, prompt, maxTokens = "128"]) {
  if (prompt === undefined) {
    console.error("usage: node generate.js ADDRESS SCHEMA_FILE PROMPT [MAX_TOKENS]");
    process.exit(2);
  }
  const root = process.env.PROTO_ROOT || path.resolve(__dirname, "../../..");
  const definition = loader.loadSync("protos/engine/v1/engine.proto", {
    includeDirs: [root],
    keepCase: true,
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true,
  });
  const { Engine } = grpc.loadPackageDefinition(definition).lockstep.engine.v1;
  const engine = new Engine(address, grpc.credentials.createInsecure());
  const call = engine.Generate(
    {
      messages: { messages: [{ role: "user", content: prompt }] },
      sampling: { max_tokens: Number(maxTokens), temperature: 0 },
      grammar: { json_schema: fs.readFileSync(schemaFile, "utf8") },
    },
    { deadline: Date.now() + 120_000 },
  );

  let text = "";
  let last = null;
  call.on("data", (response) => {
    text += response.text;
    last = response;
    console.log(JSON.stringify({ delta: response.text, token_ids: response.token_ids }));
  });
  call.on("error", (error) => {
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    engine.close();
    process.exitCode = 1;
  });
  call.on("end", () => {
    if (last !== null) {
      console.log(JSON.stringify({ text, finish_reason: last.finish_reason, usage: last.usage }));
    }
    engine.close();
  });
}

main(process.argv.slice(2));
