// One generation of a pane: from the request to its last event, over as many sockets as it takes.

import { Meter } from "./meter.js";

/** How many alternatives to each token are asked for. */
const NUM_ALTERNATIVES = 5;

/** Starts to generate in a pane's session, or in a new one; an empty `prompt` continues. */
export function generationIn({ session, server, model }, prompt, sampling) {
  const options = { ...sampling, top_logprobs: NUM_ALTERNATIVES };
  if (session) return session.generate(prompt, options);
  return server.client.complete(prompt, { ...options, keep: true, model: model?.id });
}

/**
 * Reads a generation and tells `watcher` of it: `begun(session, run)`, `token(event, run)`,
 * `finished(event, run)`, `reset(event, run)`, `failed(error, run)`, and `over(run)` at last.
 * What was abandoned is told no more, and its new session is freed.
 */
export class Run {
  seed = null;
  isAbandoned = false;
  isStopping = false;
  wasLost = false; // its connection, since the last token

  lastPastSeq = 0; // events up to it were there before the page was opened
  #reachPresent;
  /** Resolves when all events are read that were there before, or none will be. */
  reachedPresent = new Promise((resolve) => (this.#reachPresent = resolve));

  constructor(pane, generation, watcher, meter = new Meter(performance.now())) {
    Object.assign(this, { pane, generation, watcher, meter });
    this.done = this.#read();
  }

  /** Ends it; what was written stays. */
  stop() {
    if (this.isStopping) return;
    this.isStopping = true;
    this.generation.cancel();
  }

  /** Ends it without another event. */
  abandon() {
    this.isAbandoned = true;
    this.stop();
  }

  async #read() {
    const { client } = this.pane.server;
    try {
      const begun = await this.generation.begun();
      if (this.isAbandoned) return;
      this.seed = begun.seed ?? null;
      this.lastPastSeq = begun.last_seq ?? 0;
      this.watcher.begun(client.session(begun.session), this);
      if (begun.seq >= this.lastPastSeq) this.#reachPresent();
      for await (const event of this.generation) {
        if (this.isAbandoned) return;
        this.watcher[event.type]?.(event, this);
        if (event.type === "token") this.wasLost = false;
        if (event.seq >= this.lastPastSeq) this.#reachPresent();
      }
    } catch (error) {
      if (!this.isAbandoned && !this.isStopping) this.watcher.failed(error, this);
    } finally {
      this.#end(client);
    }
  }

  #end(client) {
    this.#reachPresent();
    if (!this.isAbandoned) {
      this.watcher.over(this);
      return;
    }
    const { session } = this.generation;
    if (session) this.pane.server.free(client.session(session));
  }
}
