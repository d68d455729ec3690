// What reads a stream in a page: the transports of the Vercel AI SDK and of TanStack AI, unchanged.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { Readable } from "node:stream";
import { after, before, test } from "node:test";

import { createDurableChatTransport } from "@durable-streams/aisdk-transport";
import { durableStreamConnection } from "@durable-streams/tanstack-ai-transport";
import { readUIMessageStream } from "ai";

import { ask, headers, newTurn, streamOf } from "./served.mjs";

/** The application's own server, which has the key: it submits a prompt and passes reads on. */
const application = createServer(async (incoming, outgoing) => {
  const url = new URL(incoming.url, "http://application");
  if (incoming.method === "POST") {
    const { id: session, messages } = await new Response(Readable.toWeb(incoming)).json();
    const { headers: head } = await fetch(streamOf(session), { method: "HEAD", headers });
    const turn = head.get("stream-next-offset");
    const prompt = messages.at(-1).parts[0].text;
    answers.push(ask("/v1/completions", { session, prompt, max_tokens: 24 }));
    const location = `/read/${session}?format=ai-sdk&turn=${turn}`;
    outgoing.writeHead(201, { location }).end();
    return;
  }
  const left = new AbortController();
  outgoing.on("close", () => left.abort());
  const session = url.pathname.split("/").at(-1);
  const asked = { headers, signal: left.signal };
  const answer = await fetch(`${streamOf(session)}${url.search}`, asked);
  outgoing.writeHead(answer.status, Object.fromEntries(answer.headers));
  if (answer.body === null) outgoing.end();
  else Readable.fromWeb(answer.body).on("error", () => outgoing.destroy()).pipe(outgoing);
});
const answers = [];
let api;

before(async () => {
  await new Promise((listening) => application.listen(0, "127.0.0.1", listening));
  api = `http://127.0.0.1:${application.address().port}`;
});
after(() => application.closeAllConnections() ?? application.close());

test("the AI SDK's transport has the whole turn as one message", async () => {
  const { session } = await newTurn();
  const transport = createDurableChatTransport({ api: `${api}/chat` });
  const messages = [{ id: "1", role: "user", parts: [{ type: "text", text: " And then" }] }];
  const chunks = await transport.sendMessages({ trigger: "submit-message", chatId: session, messages });
  let message;
  for await (message of readUIMessageStream({ stream: chunks }));
  const [part] = message.parts;
  assert.equal(message.role, "assistant");
  assert.equal(part.state, "done");
  assert.equal(part.text, (await answers.at(-1)).choices[0].text);
});

test("TanStack AI's connection has what was generated, and then what comes", async () => {
  const { session, text } = await newTurn();
  const readUrl = `${api}/read/${session}?format=ag-ui`;
  const connection = durableStreamConnection({ sendUrl: `${api}/chat`, readUrl });
  const leave = new AbortController();
  const chunks = connection.subscribe(leave.signal)[Symbol.asyncIterator]();
  const { value: snapshot } = await chunks.next();
  assert.equal(snapshot.type, "MESSAGES_SNAPSHOT");
  assert.equal(snapshot.messages[0].parts[0].content, text);
  const whole = await ask("/v1/completions", { session, prompt: "", max_tokens: 8 });
  const found = [];
  while (found.at(-1)?.type !== "RUN_FINISHED") found.push((await chunks.next()).value);
  leave.abort();
  assert.equal(found.map(({ delta }) => delta ?? "").join(""), whole.choices[0].text);
});
