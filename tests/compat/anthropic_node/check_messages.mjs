// Messages: whole, streamed, with tools, parsed by a zod schema, counted; errors; models.
import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

import { MODEL, QUESTION, client } from "./served.mjs";

const api = client();
const asked = { model: MODEL, max_tokens: 24, messages: QUESTION };
const weather = {
  name: "weather",
  input_schema: {
    type: "object",
    properties: { unit: { type: "string", enum: ["C", "F"] } },
    required: ["unit"],
    additionalProperties: false,
  },
};

test("a message has text and usage", async () => {
  const answer = await api.messages.create({ ...asked, max_tokens: 8, system: "You tell stories." });
  assert.ok(answer.content[0].text);
  assert.equal(answer.stop_reason, "max_tokens");
  assert.equal(answer.usage.output_tokens, 8);
});

test("a stream says what the whole answer says", async () => {
  const same = { ...asked, seed: 4 };
  const whole = await api.messages.create(same);
  let text = "";
  const stream = api.messages.stream(same).on("text", (piece) => (text += piece));
  const final = await stream.finalMessage();
  assert.equal(text, whole.content[0].text);
  assert.equal(final.content[0].text, text);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test("the events come in their order", async () => {
  const kinds = [];
  for await (const event of await api.messages.create({ ...asked, stream: true }))
    kinds.push(event.type);
  assert.deepEqual(kinds.slice(0, 2), ["message_start", "content_block_start"]);
  const ends = ["content_block_stop", "message_delta", "message_stop"];
  assert.deepEqual(kinds.slice(-3), ends);
  assert.deepEqual([...new Set(kinds.slice(2, -3))], ["content_block_delta"]);
});

test("a tool is called, also in a stream, and its result is read", async () => {
  const choice = { type: "tool", name: "weather" };
  const called = { ...asked, max_tokens: 200, tools: [weather], tool_choice: choice };
  const streamed = await api.messages.stream(called).finalMessage();
  const answer = await api.messages.create(called);
  for (const { content, stop_reason } of [streamed, answer]) {
    assert.equal(stop_reason, "tool_use");
    assert.ok(["C", "F"].includes(content[0].input.unit));
  }
  const result = { type: "tool_result", tool_use_id: answer.content[0].id, content: "Rain." };
  const final = await api.messages.create({
    ...asked,
    tools: [weather],
    tool_choice: { type: "none" },
    messages: [
      ...QUESTION,
      { role: "assistant", content: answer.content },
      { role: "user", content: [result] },
    ],
  });
  assert.equal(final.content[0].type, "text");
});

test("the runner calls a function and asks again", async () => {
  const hours = [];
  const run = ({ hour }) => {
    hours.push(hour);
    return `At ${hour}.`;
  };
  const inputSchema = z.object({ hour: z.enum(["noon", "night"]) });
  const tool = betaZodTool({ name: "place", description: "A place", inputSchema, run });
  const runner = api.beta.messages.toolRunner({
    ...asked,
    max_tokens: 300,
    tools: [tool],
    tool_choice: { type: "any" },
    max_iterations: 2,
  });
  await runner;
  assert.ok(hours.length >= 1);
});

test("parse gives what the schema says", async () => {
  const Pet = z.object({ kind: z.enum(["cat", "dog"]) });
  const format = zodOutputFormat(Pet);
  const answer = await api.messages.parse({ ...asked, max_tokens: 100, output_config: { format } });
  assert.ok(["cat", "dog"].includes(answer.parsed_output.kind));
});

test("the count is what is read", async () => {
  const body = { model: MODEL, messages: QUESTION, system: "You count." };
  const { input_tokens: counted } = await api.messages.countTokens(body);
  const { usage } = await api.messages.create({ ...body, max_tokens: 1 });
  assert.equal(counted, usage.input_tokens + usage.cache_read_input_tokens);
});

test("models are listed", async () => {
  const found = [];
  for await (const model of api.models.list()) found.push(model.id);
  assert.deepEqual(found, [MODEL]);
  assert.equal((await api.models.retrieve(MODEL)).type, "model");
});

test("errors are the package's own", async () => {
  const cases = [
    [client("wrong"), {}, Anthropic.AuthenticationError],
    [client("reader"), {}, Anthropic.PermissionDeniedError],
    [api, { model: "none" }, Anthropic.NotFoundError],
    [api, { temprature: 1 }, Anthropic.BadRequestError],
  ];
  for (const [one, body, kind] of cases) {
    await assert.rejects(one.messages.create({ ...asked, ...body }), (error) => {
      assert.ok(error instanceof kind, error);
      assert.ok(error.requestID);
      return true;
    });
  }
});

test("a message under a key is generated once", async () => {
  const options = { headers: { "Idempotency-Key": "of node" } };
  const first = await api.messages.create(asked, options);
  const again = await api.messages.create(asked, options);
  assert.deepEqual(again.content, first.content);
});
