// One socket: which request each frame belongs to, and whether anybody is still there.

import { errorOf } from "./errors.js";
import { encode } from "./message.js";

/** What `receive` of an exchange says: more frames will come, */
export const MORE = "more";
/** none will, */
export const DONE = "done";
/** or the server leaves, and the exchange goes on over another socket. */
export const MOVE = "move";

/**
 * A request, for as long as it takes and over as many sockets as it needs.
 *
 * `opening` is the message that begins it, or that takes it up again. `receive` says what
 * comes after an event: one of the above, or the seconds to wait before it is sent again.
 * `survives` is asked when its socket has ended: whether it goes on over another one.
 * `ending` is sent after `opening`, if it is set: the request ends, or goes on without a reader.
 * `isUnanswered`: nothing has come since it was sent.
 *
 * @typedef {object} Exchange
 * @property {() => Record<string, unknown>} opening
 * @property {(event: any) => string | number} receive
 * @property {() => boolean} survives
 * @property {(error: Error) => void} fail
 * @property {"cancel" | "detach" | null} ending
 * @property {boolean} isUnanswered
 */

/**
 * What a link tells its owner.
 * @typedef {object} LinkWatcher
 * @property {(link: Link) => void} opened
 * @property {() => void} heard
 * @property {(link: Link, exchange: Exchange, afterS: number | null) => void} resend
 *   the exchange is to be sent again: in so many seconds, or over another socket
 * @property {(link: Link, code: number, reason: string) => void} ended
 */

/**
 * The timers of the platform, or a test's.
 * @typedef {object} Timers
 * @property {(callback: () => void, ms: number) => any} setTimeout
 * @property {(timer: any) => void} clearTimeout
 */

const OPEN = 1;

/** A socket from its handshake to its end. */
export class Link {
  /** @type {Map<string, Exchange>} */
  #alive = new Map();
  /** @type {WebSocket} */
  #socket;
  /** @type {any} */
  #timer = null;
  #numSent = 0;
  #wasHeard = true;
  #isProbed = false;
  #isOver = false;

  /**
   * @param {WebSocket} socket
   * @param {LinkWatcher} watcher
   * @param {Timers} timers
   * @param {number} timeoutMs silence after which the connection counts as lost
   */
  constructor(socket, watcher, timers, timeoutMs) {
    this.#socket = socket;
    this.watcher = watcher;
    this.timers = timers;
    this.timeoutMs = timeoutMs;
    socket.addEventListener("open", () => this.#isOver || watcher.opened(this));
    socket.addEventListener("message", ({ data }) => this.#receive(data));
    socket.addEventListener("close", ({ code, reason }) => this.#end(code, reason));
    socket.addEventListener("error", () => {}); // a "close" follows, which says more
    this.#watch();
  }

  get isOpen() {
    return !this.#isOver && this.#socket.readyState === OPEN;
  }

  get isIdle() {
    return this.#alive.size === 0;
  }

  /** @returns {Iterable<Exchange>} the exchanges that still run */
  get exchanges() {
    return this.#alive.values();
  }

  /**
   * Sends what begins an exchange or takes it up again.
   * @param {Exchange} exchange
   */
  start(exchange) {
    this.#numSent += 1;
    const id = `r${this.#numSent}`;
    let text;
    try {
      text = encode({ ...exchange.opening(), request_id: id });
    } catch (error) {
      exchange.fail(/** @type {Error} */ (error));
      return;
    }
    this.#alive.set(id, exchange);
    this.#socket.send(text);
    if (exchange.ending) this.#send({ type: exchange.ending, request_id: id });
  }

  /**
   * Sends an exchange's `ending`, if it runs here.
   * @param {Exchange} exchange
   */
  requestEnd(exchange) {
    const id = this.#idOf(exchange);
    if (id !== undefined) this.#send({ type: exchange.ending, request_id: id });
  }

  /**
   * Leaves an exchange: its frames are no longer wanted.
   * @param {Exchange} exchange
   * @param {"cancel" | "detach"} ending what becomes of it
   */
  drop(exchange, ending) {
    const id = this.#idOf(exchange);
    if (id === undefined) return;
    this.#alive.delete(id);
    this.#send({ type: ending, request_id: id });
  }

  /** Ends the socket; its owner is not told. */
  close() {
    this.#isOver = true;
    this.timers.clearTimeout(this.#timer);
    this.#socket.close();
  }

  /** @param {Exchange} exchange */
  #idOf(exchange) {
    for (const [id, one] of this.#alive) if (one === exchange) return id;
    return undefined;
  }

  /** @param {Record<string, unknown>} message */
  #send(message) {
    if (this.isOpen) this.#socket.send(JSON.stringify(message));
  }

  /** @param {string} data */
  #receive(data) {
    if (this.#isOver) return;
    this.#wasHeard = true;
    let event;
    try {
      event = JSON.parse(data);
    } catch {
      event = null;
    }
    if (typeof event?.type !== "string") {
      this.#socket.close();
      this.#end(1002, "what came is no event of this protocol");
      return;
    }
    this.watcher.heard();
    const exchange = this.#alive.get(event.request_id);
    if (exchange === undefined) {
      if (event.type === "error" && event.request_id === null) this.#failUnanswered(event);
      return;
    }
    const next = exchange.receive(event);
    if (next === MORE) return;
    this.#alive.delete(event.request_id);
    if (next === DONE) return;
    this.watcher.resend(this, exchange, typeof next === "number" ? next : null);
  }

  /**
   * The server could not read a message and cannot say whose it was: none may hang.
   * @param {any} event
   */
  #failUnanswered(event) {
    for (const [id, exchange] of [...this.#alive]) {
      if (!exchange.isUnanswered) continue;
      this.#alive.delete(id);
      exchange.fail(errorOf(event.status, event));
    }
  }

  /** @param {number} code @param {string} reason */
  #end(code, reason) {
    if (this.#isOver) return;
    this.#isOver = true;
    this.timers.clearTimeout(this.#timer);
    this.watcher.ended(this, code, reason);
  }

  /**
   * Ends a socket on which nothing is heard though something is awaited. The server's pings
   * are not shown to programs, so a message that it answers with an error stands in for one.
   */
  #watch() {
    this.#timer = this.timers.setTimeout(() => {
      if (this.#wasHeard || (this.isOpen && this.isIdle)) {
        this.#wasHeard = this.#isProbed = false;
      } else if (this.isOpen && !this.#isProbed) {
        this.#isProbed = true;
        this.#send({ type: "probe", request_id: "probe" });
      } else {
        this.#socket.close();
        this.#end(1006, "nothing was heard");
        return;
      }
      this.#watch();
    }, this.timeoutMs / 3);
  }
}
