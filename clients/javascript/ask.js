// A request with one answer.

import { Cancelled, InternalServerError, errorOf } from "./errors.js";
import { DONE, MORE } from "./link.js";
import { Tries } from "./retry.js";

/** @typedef {import("./link.js").Exchange} Exchange */

/**
 * An exchange whose `answer` is one event of type `kind`.
 *
 * It is sent again if its socket ends, so the server may execute it twice.
 * @implements {Exchange}
 */
export class Ask {
  /** @type {null} */
  ending = null;
  isUnanswered = true;
  #tries;
  /** @type {(event: any) => void} */
  #resolve = () => {};
  /** @type {(error: Error) => void} */
  #reject = () => {};

  /**
   * @param {string} kind
   * @param {Record<string, unknown>} message
   * @param {number} maxTries
   */
  constructor(kind, message, maxTries) {
    this.kind = kind;
    this.message = message;
    this.#tries = new Tries(maxTries);
    /** @type {Promise<any>} */
    this.answer = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
  }

  opening() {
    return this.message;
  }

  /** @param {any} event */
  receive(event) {
    if (event.type === this.kind) {
      this.#resolve(event);
    } else if (event.type === "error") {
      return this.#refused(event);
    } else if (event.type === "finished") {
      const isFailed = event.finish_reason === "error";
      const kind = isFailed ? InternalServerError : Cancelled;
      this.#reject(new kind(event.error ?? "the request was cancelled"));
    } else {
      return MORE;
    }
    return DONE;
  }

  survives() {
    return this.#tries.take();
  }

  /** @param {Error} error */
  fail(error) {
    this.#reject(error);
  }

  /** @param {any} event */
  #refused(event) {
    // A repeated delete finds no session if the first one was executed and its answer was lost.
    const isGone = event.error?.code === "session_not_found" && this.#tries.count > 0;
    if (isGone && this.kind === "deleted") {
      this.#resolve({ type: "deleted", session: this.message.session });
      return DONE;
    }
    const verdict = this.#tries.verdict(event);
    if (verdict !== null) return verdict;
    this.#reject(errorOf(event.status, event));
    return DONE;
  }
}
