// What a program reads of a generation.

import { SessionReset } from "./errors.js";

/**
 * @typedef {import("./events.js").GenerationEvent} GenerationEvent
 * @typedef {import("./stream.js").Stream} Stream
 */

/** @type {IteratorReturnResult<undefined>} */
const NO_MORE = { value: undefined, done: true };

/**
 * The events of a generation, once over.
 *
 * Iterating gives a `token` for each token and ends with a `finished`, so that their texts
 * joined are the answer. A `reset` comes where events after those that were read are not available
 * any more. Leaving a `for await` loop early cancels what still runs; `detach` it first where
 * it shall go on.
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

  /** Where it began, or was taken up: null until that has arrived; see `begun`. */
  get first() {
    return this.#stream.first;
  }

  /** The `finished` event, once it has arrived. */
  get finished() {
    return this.#stream.finished;
  }

  /** The session's id, or null until it is known. */
  get session() {
    return this.#stream.first?.session ?? null;
  }

  /**
   * The place after the last event that was read, for `Client.resume`; null before the beginning.
   * @returns {import("./events.js").Cursor | null}
   */
  get cursor() {
    const { first } = this.#stream;
    if (this.#read !== null || first === null) return this.#read;
    return { session: first.session, epoch: first.epoch, last_seq: first.seq };
  }

  /**
   * The event that it begins with: `started`, or `resumed` or `reset` where it is read again.
   * @returns {Promise<import("./events.js").Started | import("./events.js").Resumed | import("./events.js").Reset>}
   */
  begun() {
    return this.#stream.begun;
  }

  /** All of the text that has not been read, when it is there. Throws `SessionReset` at a gap. */
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
   * Ends it and gives its `finished`, or null where it ended without one. Whoever iterates
   * over it still gets what came before.
   */
  async cancel() {
    this.#stream.requestEnd("cancel");
    await this.#stream.over;
    return this.#stream.finished;
  }

  /**
   * Leaves it to go on by itself, if its session is kept, and ends the iteration. What has not
   * been read is still there for `Client.resume`, from `cursor` on.
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
   * What leaving a loop calls: cancels what still runs, and waits until it has ended.
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
