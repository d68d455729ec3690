// The client of the protocol, on a whole session: catching up, every way to wait, what is refused.
import assert from "node:assert/strict";
import { test } from "node:test";

import { DurableStream, stream } from "@durable-streams/client";

import { ask, headers, newTurn, streamOf } from "./served.mjs";

const texts = (messages) =>
  messages.filter(({ type }) => type !== "input").map(({ text }) => text ?? "").join("");

test("what was generated is caught up with, from any offset", async () => {
  const { session, text } = await newTurn();
  const url = streamOf(session);
  const whole = await (await stream({ url, headers, live: false, json: true })).json();
  assert.equal(texts(whole), text);
  assert.equal(whole[0].type, "input");
  const handle = new DurableStream({ url, headers });
  const { offset, contentType, streamClosed } = await handle.head();
  assert.equal(contentType, "application/json");
  assert.equal(streamClosed, false);
  const rest = await handle.stream({ offset, live: false, json: true });
  assert.deepEqual(await rest.json(), []);
});

test("a text is read as text", async () => {
  const { session, prompt, text } = await newTurn();
  const url = `${streamOf(session)}?format=text`;
  const answer = await stream({ url, headers, live: false });
  assert.equal(await answer.text(), prompt + text);
});

for (const live of ["sse", "long-poll"]) {
  test(`${live} follows what comes, and ends with its turn`, async () => {
    const { session } = await newTurn();
    const handle = new DurableStream({ url: streamOf(session), headers });
    const { offset } = await handle.head();
    const url = `${streamOf(session)}?turn=${offset}`;
    const answer = await stream({ url, headers, offset: "now", live, json: true });
    const asking = ask("/v1/completions", { session, prompt: "", max_tokens: 24 });
    const found = [];
    for await (const message of answer.jsonStream()) found.push(message);
    assert.equal(texts(found), (await asking).choices[0].text);
  });
}

test("what only reads refuses writes by the protocol's errors", async () => {
  const { session } = await newTurn();
  const options = { url: streamOf(session), headers, contentType: "application/json" };
  const once = { ...options, backoffOptions: { maxRetries: 0 } };
  await assert.rejects(DurableStream.create(once), { status: 405 });
  await assert.rejects(new DurableStream(once).append("{}"), { status: 405 });
  await assert.rejects(DurableStream.delete(once), { status: 405 });
});

test("what is not there, and offsets that are none, are errors of their own", async () => {
  const { session } = await newTurn();
  const absent = { url: streamOf("none"), headers, live: false };
  await assert.rejects(stream(absent), { status: 404 });
  const wrong = { url: streamOf(session), headers, live: false, offset: "x" };
  await assert.rejects(stream(wrong), { status: 400 });
});
