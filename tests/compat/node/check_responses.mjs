// Responses over HTTP and over a WebSocket.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { ResponsesWS } from "openai/resources/responses/ws";
import { z } from "zod";

import { MODEL, PROMPT, all, client } from "./served.mjs";

const api = client();
const asked = { model: MODEL, input: PROMPT, max_output_tokens: 8, temperature: 0, ignore_eos: true };
const LAST = ["response.completed", "response.incomplete", "response.failed"];
const Pet = z.object({ kind: z.enum(["cat", "dog"]), age: z.number().int().min(0).max(20) });

/** The events of the response that is next; an error event is thrown. */
async function oneResponse(events) {
  const found = [];
  for (;;) {
    const { value, done } = await events.next();
    assert.ok(!done, "the socket was closed");
    if (value.type === "error") throw value.error;
    if (value.type !== "message") continue;
    found.push(value.message);
    if (LAST.includes(value.message.type)) return found;
  }
}

test("a response has text and usage, and is found again and followed", async () => {
  const first = await api.responses.create(asked);
  assert.ok(first.output_text);
  assert.equal(first.usage.output_tokens, 8);
  assert.equal((await api.responses.retrieve(first.id)).output_text, first.output_text);
  const second = await api.responses.create({ ...asked, previous_response_id: first.id });
  assert.equal(second.previous_response_id, first.id);
});

test("events come in order and add up", async () => {
  const events = await all(await api.responses.create({ ...asked, stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  const text = deltas.map((event) => event.delta).join("");
  assert.equal(text, events.at(-1).response.output[0].content[0].text);
});

test("parse gives what the schema says", async () => {
  const answer = await api.responses.parse({
    model: MODEL,
    input: PROMPT,
    text: { format: zodTextFormat(Pet, "pet") },
    max_output_tokens: 100,
  });
  assert.ok(Pet.parse(answer.output_parsed));
});

test("a function is called with arguments of its schema", async () => {
  const answer = await api.responses.create({
    ...asked,
    max_output_tokens: 100,
    tools: [
      {
        type: "function",
        name: "clock",
        strict: true,
        parameters: {
          type: "object",
          properties: { hour: { type: "integer", minimum: 0, maximum: 23 } },
          required: ["hour"],
          additionalProperties: false,
        },
      },
    ],
    tool_choice: "required",
  });
  assert.equal(answer.output[0].type, "function_call");
  assert.ok(JSON.parse(answer.output[0].arguments).hour <= 23);
});

test("a response in the background is cancelled", async () => {
  const begun = await api.responses.create({ ...asked, max_output_tokens: 1_000_000, background: true });
  assert.equal((await api.responses.cancel(begun.id)).status, "cancelled");
});

test("a socket gives the events of HTTP, and the next response follows on it", async () => {
  const overHttp = await all(await api.responses.create({ ...asked, stream: true }));
  const socket = new ResponsesWS(api);
  const events = socket.stream();
  socket.send({ type: "response.create", ...asked });
  const first = await oneResponse(events);
  const types = (list) => list.map((event) => event.type);
  assert.deepEqual(types(first), types(overHttp));
  const previous = first.at(-1).response.id;
  socket.send({ type: "response.create", ...asked, previous_response_id: previous });
  const second = await oneResponse(events);
  assert.equal(second.at(-1).response.previous_response_id, previous);
  socket.close();
});

test("a mistake is an error event and the socket stays", async () => {
  const socket = new ResponsesWS(api);
  const events = socket.stream();
  socket.send({ type: "response.create", ...asked, temperature: 9 });
  await assert.rejects(oneResponse(events), (error) => {
    assert.equal(error.error.error.param, "temperature");
    return true;
  });
  socket.send({ type: "response.create", ...asked });
  assert.equal((await oneResponse(events)).at(-1).type, "response.incomplete");
  socket.close();
});

test("an unknown response is not found", async () => {
  await assert.rejects(api.responses.retrieve(`resp_${"0".repeat(32)}`), OpenAI.NotFoundError);
});
