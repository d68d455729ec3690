// What the checks ask of the server without the client of the protocol.
const BASE = process.env.EVERSTREAM_URL;
export const headers = { authorization: "Bearer usual" };

export const streamOf = (session) => `${BASE}/v1/sessions/${session}/stream`;

export async function ask(path, body) {
  const answer = await fetch(`${BASE}${path}`, {
    method: "POST",
    headers: { ...headers, "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

/** A kept session that has generated something, and what. */
export async function newTurn() {
  const prompt = "Once upon a time";
  const body = { prompt, keep: true, max_tokens: 24, seed: 1 };
  const { session, choices } = await ask("/v1/completions", body);
  return { session, prompt, text: choices[0].text };
}
