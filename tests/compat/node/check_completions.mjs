// Completions, models, embeddings, and each class of errors.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

import { MODEL, PROMPT, all, client } from "./served.mjs";

const api = client();

test("models are listed", async () => {
  assert.deepEqual((await all(api.models.list())).map((model) => model.id), [MODEL]);
});

test("a completion has text and usage", async () => {
  const answer = await api.completions.create({ model: MODEL, prompt: PROMPT, max_tokens: 8, ignore_eos: true });
  assert.ok(answer.choices[0].text);
  assert.equal(answer.usage.completion_tokens, 8);
});

test("a stream says what the whole answer says", async () => {
  const asked = { model: MODEL, prompt: PROMPT, max_tokens: 12, seed: 3, ignore_eos: true };
  const whole = await api.completions.create(asked);
  const chunks = await all(
    await api.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }),
  );
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, 12);
  const text = chunks.map((chunk) => chunk.choices[0].text).join("");
  assert.equal(text, whole.choices[0].text);
});

test("comments of a stream that is silent are skipped", async () => {
  let heard = "";
  const overhearing = async (url, init) => {
    const answer = await fetch(url, init);
    const [ours, theirs] = answer.body.tee();
    const reading = new Response(ours).text().then((text) => (heard += text));
    overhearing.reading = reading;
    return new Response(theirs, { status: answer.status, headers: answer.headers });
  };
  const chunks = await all(
    await client("usual", { fetch: overhearing }).completions.create({
      model: MODEL,
      prompt: "The miller slept in the mill. ".repeat(2000),
      max_tokens: 4,
      ignore_eos: true,
      stream: true,
    }),
  );
  await overhearing.reading;
  assert.ok(chunks.length >= 4);
  assert.ok(heard.includes(": keep-alive\n\n"), heard);
});

test("an aborted stream ends and the next request is served", async () => {
  const stream = await api.completions.create({
    model: MODEL,
    prompt: PROMPT,
    max_tokens: 1_000_000,
    ignore_eos: true,
    stream: true,
  });
  let count = 0;
  for await (const _ of stream) {
    count += 1;
    if (count === 5) stream.controller.abort();
  }
  assert.ok(count < 1_000_000, `${count}`);
  const next = await api.completions.create({ model: MODEL, prompt: PROMPT, max_tokens: 2 });
  assert.ok(next.choices.length);
});

test("an aborted request is the package's own error", async () => {
  const controller = new AbortController();
  const asked = api.completions.create(
    { model: MODEL, prompt: PROMPT, max_tokens: 3000 },
    { signal: controller.signal },
  );
  setImmediate(() => controller.abort());
  await assert.rejects(asked, OpenAI.APIUserAbortError);
});

test("an embedding is a vector of length one", async () => {
  const answer = await api.embeddings.create({ model: MODEL, input: "The cat" });
  const length = answer.data[0].embedding.reduce((sum, x) => sum + x * x, 0);
  assert.ok(Math.abs(length - 1) < 1e-5, `${length}`);
});

const completion = { model: MODEL, prompt: PROMPT };
const mistakes = [
  ["bad value", "usual", { ...completion, temperature: 9 }, OpenAI.BadRequestError, "invalid_value"],
  ["wrong key", "wrong", completion, OpenAI.AuthenticationError, "invalid_api_key"],
  ["missing scope", "reader", completion, OpenAI.PermissionDeniedError, "scope_missing"],
  ["model", "usual", { ...completion, model: "gpt-9" }, OpenAI.NotFoundError, "model_not_found"],
];
for (const [name, key, asked, kind, code] of mistakes) {
  test(`${name}: ${kind.name}`, async () => {
    await assert.rejects(client(key).completions.create(asked), (error) => {
      assert.ok(error instanceof kind, `${error}`);
      assert.equal(error.code, code);
      return true;
    });
  });
}

test("a used up limit is a rate limit error, and a retry waits for it", async () => {
  const limited = client("limited");
  const use = async () => {
    for (let i = 0; i < 100; i += 1) await limited.models.list();
  };
  await assert.rejects(use, OpenAI.RateLimitError);
  const retrying = client("limited", { maxRetries: 5 });
  assert.equal((await all(retrying.models.list())).length, 1);
});
