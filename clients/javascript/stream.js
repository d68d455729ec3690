// A generation on the wire: how it continues after each event and each lost socket.

import {
  Cancelled,
  ConnectionLost,
  InternalServerError,
  ProtocolError,
  ReaderTooSlow,
  errorOf,
} from "./errors.js";
import { Inbox } from "./inbox.js";
import { DONE, MORE, MOVE } from "./link.js";
import { Tries } from "./retry.js";

/**
 * @typedef {import("./link.js").Exchange} Exchange
 * @typedef {import("./events.js").Started} Started
 * @typedef {import("./events.js").Resumed} Resumed
 * @typedef {import("./events.js").Reset} Reset
 */

/**
 * How a stream begins. `isKept`: its session is kept. `follows`: it reads the events of all
 * generations, not only of one.
 * @typedef {object} Beginning
 * @property {Record<string, unknown>} message
 * @property {boolean} isKept
 * @property {boolean} follows
 */

/** @implements {Exchange} */
export class Stream {
  /** @type {Inbox<import("./events.js").GenerationEvent>} */
  inbox = new Inbox();
  /** @type {Started | Resumed | Reset | null} the first event */
  first = null;
  /** @type {import("./events.js").Finished | null} the latest one */
  finished = null;
  /** @type {"cancel" | "detach" | null} */
  ending = null;
  isUnanswered = true;
  isEnded = false;

  /** @type {Started | Resumed | Reset | null} the event that began the present part of the stream */
  #latest = null;
  #lastSeq = 0; // of the last event that has arrived
  #wasSent = false;
  #isDetached = false; // because its reader is slow
  #tries;
  /** @type {(event: Started | Resumed | Reset) => void} */
  #begin = () => {};
  /** @type {(error: unknown) => void} */
  #neverBegin = () => {};
  /** @type {() => void} */
  #settle = () => {};

  /**
   * @param {import("./connection.js").Connection} connection
   * @param {Beginning} beginning
   * @param {{maxTries: number, maxUnread: number}} limits
   */
  constructor(connection, beginning, limits) {
    this.connection = connection;
    this.beginning = beginning;
    this.maxUnread = limits.maxUnread;
    this.#tries = new Tries(limits.maxTries);
    /** @type {Promise<Started | Resumed | Reset>} */
    this.begun = new Promise((resolve, reject) => {
      this.#begin = resolve;
      this.#neverBegin = reject;
    });
    this.begun.catch(() => {}); // the inbox reports the error too
    /** @type {Promise<void>} */
    this.over = new Promise((resolve) => (this.#settle = resolve));
  }

  /**
   * Returns the next event, or null after the last one.
   * @returns {Promise<import("./events.js").GenerationEvent | null>}
   */
  next() {
    const event = this.inbox.next();
    if (this.#isDetached && this.inbox.size <= this.maxUnread / 2) this.#reattach();
    return event;
  }

  /**
   * Asks the server to cancel or detach the generation. `over` resolves when that is done.
   * @param {"cancel" | "detach"} ending
   */
  requestEnd(ending) {
    if (this.isEnded) return;
    this.ending = ending;
    if (this.#isDetached && ending === "cancel") this.#reattach();
    else if (this.#isDetached) this.#end();
    else if (!this.connection.isWaiting(this)) this.connection.requestEnd(this);
    else if (this.#needsNoSocket()) this.#leave("cancel");
  }

  // The methods of Exchange, called by the connection

  opening() {
    this.isUnanswered = this.#wasSent = true;
    const latest = this.#latest;
    if (latest === null) return this.beginning.message;
    return {
      type: "resume",
      session: latest.session,
      epoch: latest.epoch,
      last_seq: this.#lastSeq,
      take_over: true, // the server may not know yet that our previous socket has ended
    };
  }

  /**
   * @param {any} event
   * @returns {string | number}
   */
  receive(event) {
    this.isUnanswered = false;
    switch (event.type) {
      case "token":
        return this.#continue(event);
      case "finished":
        return this.#finish(event);
      case "started":
      case "resumed":
      case "reset":
        return this.#open(event);
      case "migrate":
        if (this.survives()) return MOVE;
        return this.#end(new ConnectionLost("the server is stopping"));
      case "detached":
        return this.#end();
      case "error":
        return this.#tries.verdict(event) ?? this.#end(errorOf(event.status, event));
      default:
        return MORE; // an event type of a later server
    }
  }

  survives() {
    if (this.ending !== null && this.#needsNoSocket()) {
      this.#end();
      return false;
    }
    // Before its first event a retry is safe: it keeps no session, or has an idempotency key.
    return (this.beginning.isKept || this.#latest === null) && this.#tries.take();
  }

  /** @param {Error} error */
  fail(error) {
    this.#end(error);
  }

  // Internal methods

  /** Whether `ending` has taken effect without a message, because there is no socket. */
  #needsNoSocket() {
    if (this.ending === "detach") return this.#latest !== null;
    return !this.#wasSent || !this.beginning.isKept;
  }

  /** Whether more events will arrive. */
  #goesOn() {
    const latest = this.#latest;
    if (latest === null || latest.type === "started") return true;
    return latest.busy || this.#lastSeq < latest.last_seq;
  }

  /** @param {Started | Resumed | Reset} event */
  #open(event) {
    this.#latest = event;
    this.#lastSeq = event.seq;
    this.first ??= event;
    this.#begin(event);
    if (event.type === "reset") this.inbox.push(event);
    if (this.#goesOn()) {
      // The server may have ignored an ending that arrived before the request had begun.
      if (this.ending !== null) this.connection.requestEnd(this);
      return MORE;
    }
    return this.#endOfLog();
  }

  #endOfLog() {
    const wantsEnd = !this.beginning.follows && this.#latest?.type !== "reset";
    if (!wantsEnd || this.ending !== null) return this.#end();
    return this.#end(new ProtocolError("the log has no end of this generation"));
  }

  /** @param {import("./events.js").Token} event */
  #continue(event) {
    if (event.seq !== this.#lastSeq + 1) {
      if (event.seq <= this.#lastSeq) return MORE; // a repeat
      return this.#fault(`event ${event.seq} came after ${this.#lastSeq}`);
    }
    if (this.inbox.size >= this.maxUnread && this.ending === null) return this.#detach();
    this.#note(event);
    return this.#goesOn() ? MORE : this.#endOfLog();
  }

  /** @param {import("./events.js").Finished} event */
  #finish(event) {
    const latest = this.#latest;
    const isPast = latest !== null && latest.type !== "started" && event.seq <= latest.last_seq;
    const isBusy = isPast && latest.busy;
    this.finished = event;
    this.#note(event);
    if (isPast && this.beginning.follows && this.#goesOn()) return MORE;
    if (isBusy) this.connection.drop(this, "detach"); // a later generation is attached to it
    const failed = event.finish_reason === "error";
    return this.#end(failed ? new InternalServerError(event.error ?? "the request failed") : null);
  }

  /** @param {import("./events.js").Token | import("./events.js").Finished} event */
  #note(event) {
    this.#lastSeq = event.seq;
    this.#tries.count = 0;
    this.inbox.push(event);
  }

  /** Handles a slow reader: detaches a generation on a kept session, fails any other. */
  #detach() {
    if (!this.beginning.isKept) {
      const error = new ReaderTooSlow(`more than ${this.maxUnread} events were left unread`);
      return this.#leave("cancel", error);
    }
    this.connection.drop(this, "detach");
    this.#isDetached = true;
    return DONE;
  }

  #reattach() {
    this.#isDetached = false;
    this.connection.start(this);
  }

  /** @param {string} message */
  #fault(message) {
    return this.#leave("detach", new ProtocolError(message));
  }

  /** @param {"cancel" | "detach"} ending @param {Error | null} [error] */
  #leave(ending, error = null) {
    this.connection.drop(this, ending);
    return this.#end(error);
  }

  /** @param {Error | null} [error] */
  #end(error = null) {
    if (this.isEnded) return DONE;
    this.isEnded = true;
    if (error === null) this.inbox.end();
    else this.inbox.fail(error);
    this.#neverBegin(error ?? new Cancelled("the request ended before it began"));
    this.#settle();
    return DONE;
  }
}
