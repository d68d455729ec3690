// A generation as a program reads it.

import { SessionReset } from "./errors.js";

/**
 * @typedef {import("./events.js").GenerationEvent} GenerationEvent
 * @typedef {import("./stream.js").Stream} Stream
 */

/** @type {IteratorReturnResult<undefined>} */
const NO_MORE = { value: undefined, done: true };

/**
 * The events of a generation, for a single pass.
 *
 * Iterating yields a `token` for each token and a `finished` at the end. The answer is their texts,
 * joined. A `reset` comes if the next events are not available any more. Leaving a `for await` loop
 * early cancels the generation; call `detach` before that to leave it running.
 *
 * @implements {AsyncIterableIterator<GenerationEvent>}
 */
export class Generation {
  /** @type {import("./events.js").Cursor | null} */
  #read = null;
  #stream;
  #abort = () => {};

  /**
   * @param {Stream} stream
   * @param {AbortSignal} [signal]
   */
  constructor(stream, signal) {
    this.#stream = stream;
    if (signal === undefined) return;
    this.#abort = () => {
      stream.inbox.discard();
      stream.inbox.fail(signal.reason);
      stream.requestEnd("cancel");
    };
    signal.addEventListener("abort", this.#abort, { once: true });
    stream.over.then(() => signal.removeEventListener("abort", this.#abort));
  }

  /** The first event: `started`, `resumed` or `reset`. Null until it has arrived; see `begun`. */
  get first() {
    return this.#stream.first;
  }

  /** The `finished` event, or null until it has arrived. */
  get finished() {
    return this.#stream.finished;
  }

  /** The session's id, or null until it is known. */
  get session() {
    return this.#stream.first?.session ?? null;
  }

  /**
   * The position after the last event that was read, for `Client.resume`. Null until the first
   * event has arrived.
   * @returns {import("./events.js").Cursor | null}
   */
  get cursor() {
    const { first } = this.#stream;
    if (this.#read !== null || first === null) return this.#read;
    return { session: first.session, epoch: first.epoch, last_seq: first.seq };
  }

  /**
   * Waits for the first event: `started`, or `resumed` or `reset` if the events are read again.
   * @returns {Promise<import("./events.js").Started | import("./events.js").Resumed | import("./events.js").Reset>}
   */
  begun() {
    return this.#stream.begun;
  }

  /** Waits for the end and returns the unread text. Throws `SessionReset` at a gap. */
  async text() {
    let text = "";
    for (;;) {
      const { value: event } = await this.next();
      if (event === undefined) return text;
      if (event.type === "reset") {
        await this.detach();
        throw new SessionReset(event);
      }
      text += event.text;
    }
  }

  /**
   * Cancels the generation and returns its `finished`, or null if it ended without one. A loop
   * over it still gets the events before the end.
   */
  async cancel() {
    this.#stream.requestEnd("cancel");
    await this.#stream.over;
    return this.#stream.finished;
  }

  /**
   * Stops reading, and leaves the generation of a kept session running. `Client.resume` returns
   * the unread events, from `cursor` on.
   */
  async detach() {
    this.#stream.inbox.discard();
    this.#stream.inbox.end();
    this.#stream.requestEnd("detach");
    await this.#stream.over;
  }

  /** @returns {Promise<IteratorResult<GenerationEvent, undefined>>} */
  async next() {
    const event = await this.#stream.next();
    if (event === null) return NO_MORE;
    const epoch = event.type === "reset" ? event.epoch : this.cursor?.epoch;
    const session = this.session;
    if (session !== null && epoch !== undefined) {
      this.#read = { session, epoch, last_seq: event.seq };
    }
    return { value: event, done: false };
  }

  /**
   * Called when a loop is left early: cancels the generation and waits for its end.
   * @returns {Promise<IteratorResult<GenerationEvent, undefined>>}
   */
  async return() {
    this.#stream.inbox.discard();
    this.#stream.inbox.end();
    await this.cancel();
    return NO_MORE;
  }

  [Symbol.asyncIterator]() {
    return this;
  }
}
