// Chat completions as they are streamed: server-sent events of `fetch`.

/** Yields `{delta, usage}` of each chunk. Throws an error with the server's message. */
export async function* streamChat(body, headers, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify({ ...body, ...options }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  for await (const line of linesOf(response.body)) {
    if (!line.startsWith("data: {")) continue;
    const chunk = JSON.parse(line.slice("data: ".length));
    if (chunk.error) throw new Error(chunk.error.message);
    yield { delta: chunk.choices[0]?.delta ?? {}, usage: chunk.usage };
  }
}

async function* linesOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}

/** An error with the message of the server, or else with the status. */
export async function errorOf(response) {
  const answer = await response.json().catch(() => null);
  return new Error(answer?.error?.message ?? `The server answered ${response.status}.`);
}
