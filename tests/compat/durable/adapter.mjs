// What the conformance suite writes by PUT and POST becomes text that a kept session is fed with;
// all that it reads is answered by the server. Other writes are not supported here either.
import { createServer, request } from "node:http";

const everstream = new URL(process.env.EVERSTREAM_URL);
const headers = { authorization: "Bearer usual", "content-type": "application/json" };
const sessions = new Map();

/** One request of the API, as JSON. */
async function ask(path, body) {
  const answer = await fetch(new URL(path, everstream), {
    method: "POST",
    headers,
    body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

async function write(session, text) {
  if (text) await ask(`/v1/sessions/${session}/append`, { text });
  const url = new URL(`/v1/sessions/${session}/stream?format=text`, everstream);
  const { headers: found } = await fetch(url, { method: "HEAD", headers });
  return found.get("stream-next-offset");
}

async function answerWrite(incoming, outgoing, path) {
  const chunks = [];
  for await (const chunk of incoming) chunks.push(chunk);
  if (incoming.method === "PUT") sessions.set(path, (await ask("/v1/sessions", {})).session);
  const session = sessions.get(path);
  const offset = await write(session, Buffer.concat(chunks).toString());
  const type = incoming.headers["content-type"] ?? "text/plain";
  outgoing.writeHead(incoming.method === "PUT" ? 201 : 204, {
    "content-type": type,
    "stream-next-offset": offset,
  });
  outgoing.end();
}

/** Every read, unchanged, of the session that a path stands for. */
function forward(incoming, outgoing, url) {
  const session = sessions.get(url.pathname) ?? "none";
  const query = url.search ? `${url.search}&format=text` : "?format=text";
  const onward = request(
    {
      host: everstream.hostname,
      port: everstream.port,
      method: incoming.method,
      path: `/v1/sessions/${session}/stream${query}`,
      headers: { ...incoming.headers, authorization: "Bearer usual" },
    },
    (answer) => {
      outgoing.writeHead(answer.statusCode, answer.headers);
      answer.pipe(outgoing);
    },
  );
  outgoing.on("close", () => onward.destroy());
  onward.on("error", () => outgoing.destroy());
  onward.end();
}

/** The adapter, as a server of Node that does not listen yet. */
export const adapter = createServer((incoming, outgoing) => {
  const url = new URL(incoming.url, "http://adapter");
  if (["PUT", "POST"].includes(incoming.method)) {
    answerWrite(incoming, outgoing, url.pathname).catch((error) => {
      outgoing.writeHead(500).end(String(error));
    });
  } else {
    forward(incoming, outgoing, url);
  }
});
