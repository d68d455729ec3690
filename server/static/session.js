// One kept session on the server, and the one request that may run in it.

import { Meter } from "./meter.js";

/**
 * Speaks the protocol for the page: `generate`, `stop`, `reset`.
 *
 * `send(message)` says whether it could be sent. `onText` gets text as it
 * arrives, `onEnd` a finished request, `onError` words for the reader, and
 * `onChange` is called after every change of the fields here.
 */
export class Session {
  #send;
  #listener;
  #requests = 0;
  #doomed = new Set();

  constructor(send, listener) {
    this.#send = send;
    this.#listener = listener;
    this.id = null;
    this.position = 0;
    this.atEndOfText = false;
    this.run = null;
    this.meter = null;
  }

  /** Goes on with the session, or opens one; an empty `prompt` continues. Returns whether it was sent. */
  generate(prompt, sampling) {
    const requestId = this.#nextId();
    const message = { type: "generate", request_id: requestId, prompt, keep: true, ...sampling };
    if (this.id) message.session = this.id;
    if (!this.#send(message)) return false;
    this.run = { requestId, seed: null, stopping: false };
    this.meter = new Meter(performance.now());
    this.atEndOfText = false;
    this.#listener.onChange();
    return true;
  }

  /** Cancels the running request; what was written stays. */
  stop() {
    if (!this.run || this.run.stopping) return;
    this.run.stopping = true;
    this.#send({ type: "cancel", request_id: this.run.requestId });
  }

  /** Forgets the session here and frees it on the server. */
  reset() {
    if (this.id) this.#doomed.add(this.id);
    else if (this.run) this.#send({ type: "cancel", request_id: this.run.requestId });
    this.#forget();
    this.run = null;
    this.meter = null;
    this.freeDoomed();
    this.#listener.onChange();
  }

  /** Asks again for what could not be deleted while there was no connection. */
  freeDoomed() {
    for (const session of this.#doomed) {
      this.#send({ type: "delete", request_id: this.#nextId(), session });
    }
  }

  /** The connection broke: the server has cancelled the running request. */
  connectionLost() {
    if (!this.run) return;
    this.run = null;
    this.#listener.onError(
      "The connection was lost while the text was being written. Its end may be missing here; " +
        "Continue goes on from where the server stopped.",
    );
    this.#listener.onChange();
  }

  /** Takes one message of the server. */
  handle(event) {
    if (event.type === "deleted") this.#doomed.delete(event.session);
    else if (event.request_id === this.run?.requestId) this.#handleRun(event);
    else if (event.type === "error") this.#handleStray(event);
    else if (event.session) this.#handleAbandoned(event);
    this.#listener.onChange();
  }

  #handleRun(event) {
    switch (event.type) {
      case "started":
        this.id = event.session;
        this.position = event.position;
        this.run.seed = event.seed;
        break;
      case "token":
        this.meter.token(performance.now());
        this.position = event.position + 1;
        this.#listener.onText(event.text);
        break;
      case "finished":
        this.#finish(event);
        break;
      case "error":
        this.run = null;
        this.#explain(event.error);
        break;
    }
  }

  #finish(event) {
    const { seed } = this.run;
    this.run = null;
    // What has failed once would fail again: the next text begins anew.
    this.id = event.finish_reason === "error" ? null : event.session;
    this.position = event.position;
    this.atEndOfText = event.finish_reason === "stop";
    this.#listener.onText(event.text);
    this.#listener.onEnd({ reason: event.finish_reason, seed, tokens: event.usage.completion_tokens });
    if (event.finish_reason === "error") this.#explain(event.error);
  }

  // A request left behind by `reset` may still tell which session it opened.
  #handleAbandoned(event) {
    if (event.session === this.id || this.#doomed.has(event.session)) return;
    this.#doomed.add(event.session);
    this.#send({ type: "delete", request_id: this.#nextId(), session: event.session });
  }

  // Deleting a session that has expired meanwhile is no news.
  #handleStray(event) {
    if (event.error.code === "session_not_found") this.#doomed.clear();
    else this.#explain(event.error);
  }

  #explain(error) {
    if (error?.code === "session_not_found") {
      this.#forget();
      this.#listener.onError("The server no longer has this session. Generate begins a new one.");
    } else {
      this.#listener.onError(error?.message ?? String(error ?? "The server could not go on."));
    }
  }

  #forget() {
    this.id = null;
    this.position = 0;
    this.atEndOfText = false;
  }

  #nextId() {
    this.#requests += 1;
    return `page-${this.#requests}`;
  }
}
