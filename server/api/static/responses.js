// Answers by `/v1/responses`, which the server keeps: they are read on after whatever ends a connection.

const ENDS = new Set(["response.completed", "response.incomplete", "response.failed"]);
const PASSING = new Set([408, 409, 429, 500, 502, 503, 504, 507]);

/** The server has refused something: `status` and `code` say what. */
export class Refused extends Error {
  constructor({ message, code }, status) {
    super(message);
    Object.assign(this, { code, status });
  }
}

/**
 * Yields the events of the answer to `body`, a response with an `idempotency_key`, each once,
 * whatever becomes of connections and of the server meanwhile. After an event `restarted` all
 * events come again, because the server did not keep the answer.
 *
 * `mayHaveIt`: the server may have it already. `lost(error)` is called after each failure that may
 * pass, and resolves when it is time for the next try. Throws `Refused`, and an `AbortError`.
 */
export async function* follow(body, { headers, signal, mayHaveIt, lost }) {
  let asked = { ...body, stream: true };
  let id = null;
  let last = -1;
  let mayRetry = mayHaveIt;
  for (;;) {
    try {
      const place = id && `/${id}?stream=true&starting_after=${last}`;
      for await (const event of eventsOf(await request(place, asked, headers(), signal))) {
        if (event.type === "error") throw new Refused(event);
        last = event.sequence_number;
        id = event.response?.id ?? id;
        mayRetry = true;
        yield event;
        if (ENDS.has(event.type)) return;
      }
      throw new TypeError("the answer has no end");
    } catch (error) {
      if (signal.aborted) throw error;
      if (error.code === "scope_missing" && asked.store !== false) {
        // This key keeps nothing on the server: the answer is then written again where it is lost.
        asked = { ...asked, store: false, background: undefined, idempotency_key: undefined };
        continue;
      }
      const isGone = error.code === "response_not_found" || asked.store === false;
      if (!(error instanceof TypeError) && !(mayRetry && (isGone || mayPass(error)))) throw error;
      mayRetry = true;
      if (id && isGone) {
        id = null;
        last = -1;
        yield { type: "restarted" };
      }
      await lost(error);
    }
  }
}

/** Ends an answer that is not wanted any more, and frees what the server keeps of it. */
export async function forget(body, id, headers) {
  const name = id ?? (await (await request("", body, headers)).json()).id;
  await fetch(`v1/responses/${name}`, { method: "DELETE", headers, keepalive: true });
}

/** The error that an answer without success stands for. */
export async function refusalOf(response) {
  const answer = await response.json().catch(() => null);
  const message = `The server answered with the status ${response.status}.`;
  return new Refused(answer?.error ?? { message }, response.status);
}

/** Whether an error may be gone at the next try; another window that reads the answer stays. */
function mayPass({ code, status }) {
  return code !== "session_attached" && (status === undefined || PASSING.has(status));
}

async function request(place, body, headers, signal) {
  const options = place
    ? { headers }
    : { method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(body) };
  const response = await fetch(`v1/responses${place ?? ""}`, { ...options, signal, cache: "no-store" });
  if (!response.ok) throw await refusalOf(response);
  return response;
}

async function* eventsOf({ body }) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice("data: ".length));
  }
}
