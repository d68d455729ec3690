// Chat: whole, streamed, parsed by a zod schema, with tools.
import assert from "node:assert/strict";
import { test } from "node:test";

import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { MODEL, QUESTION, all, client } from "./served.mjs";

const api = client();
const Pet = z.object({ kind: z.enum(["cat", "dog"]), age: z.number().int().min(0).max(20) });
const weather = zodFunction({ name: "weather", parameters: z.object({ unit: z.enum(["C", "F"]) }) });

test("a chat has a message and usage", async () => {
  const answer = await api.chat.completions.create({
    model: MODEL,
    messages: QUESTION,
    max_completion_tokens: 8,
    logprobs: true,
    top_logprobs: 2,
    ignore_eos: true,
  });
  assert.ok(answer.choices[0].message.content);
  assert.equal(answer.choices[0].logprobs.content.length, 8);
  assert.equal(answer.usage.completion_tokens, 8);
});

test("a stream says what the whole answer says", async () => {
  const asked = { model: MODEL, messages: QUESTION, max_tokens: 12, seed: 4, ignore_eos: true };
  const whole = await api.chat.completions.create(asked);
  const chunks = await all(await api.chat.completions.create({ ...asked, stream: true }));
  const text = chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
});

test("parse gives what the schema says", async () => {
  const answer = await api.chat.completions.parse({
    model: MODEL,
    messages: QUESTION,
    response_format: zodResponseFormat(Pet, "pet"),
    max_tokens: 100,
  });
  assert.ok(Pet.parse(answer.choices[0].message.parsed));
});

test("a parsed stream ends with what the schema says", async () => {
  const stream = api.chat.completions.stream({
    model: MODEL,
    messages: QUESTION,
    response_format: zodResponseFormat(Pet, "pet"),
    max_tokens: 100,
  });
  let text = "";
  stream.on("content", (delta) => {
    text += delta;
  });
  const final = await stream.finalChatCompletion();
  assert.deepEqual(JSON.parse(text), final.choices[0].message.parsed);
});

test("a forced tool is called, whole and streamed", async () => {
  const asked = {
    model: MODEL,
    messages: QUESTION,
    tools: [weather],
    tool_choice: { type: "function", function: { name: "weather" } },
    max_tokens: 100,
  };
  const whole = (await api.chat.completions.parse(asked)).choices[0].message.tool_calls[0];
  assert.equal(whole.function.name, "weather");
  assert.ok(["C", "F"].includes(whole.function.parsed_arguments.unit));
  const final = await api.chat.completions.stream(asked).finalChatCompletion();
  const streamed = final.choices[0].message.tool_calls[0];
  assert.ok(["C", "F"].includes(JSON.parse(streamed.function.arguments).unit));
});
