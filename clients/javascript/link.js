// One socket: assigns each frame to its request, and detects a lost connection.

import { errorOf } from "./errors.js";
import { encode } from "./message.js";

/** A result of `Exchange.receive`: more frames will come. */
export const MORE = "more";
/** A result of `Exchange.receive`: the exchange is over. */
export const DONE = "done";
/** A result of `Exchange.receive`: the server is leaving; continue over another socket. */
export const MOVE = "move";

/**
 * A request from its start to its end, over one or several sockets.
 *
 * `opening` returns the message that starts or resumes it. `receive` handles an event and returns
 * one of the constants above, or the seconds to wait before it is sent again. `survives` is called
 * when its socket has ended, and returns whether it continues over another one. `ending`, if set,
 * is sent after `opening`: it cancels or detaches the request. `isUnanswered`: no event has
 * arrived since it was sent.
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
 * The callbacks of a link's owner.
 * @typedef {object} LinkWatcher
 * @property {(link: Link) => void} opened
 * @property {() => void} heard
 * @property {(link: Link, exchange: Exchange, afterS: number | null) => void} resend
 *   send the exchange again: after so many seconds, or, if null, over another socket
 * @property {(link: Link, code: number, reason: string) => void} ended
 */

/**
 * The timers of the platform or of a test.
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
    socket.addEventListener("error", () => {}); // a "close" with the reason follows
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
   * Sends the message that starts or resumes an exchange.
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
   * Stops an exchange and ignores its further frames.
   * @param {Exchange} exchange
   * @param {"cancel" | "detach"} ending the message that is sent if it runs here
   */
  drop(exchange, ending) {
    const id = this.#idOf(exchange);
    if (id === undefined) return;
    this.#alive.delete(id);
    this.#send({ type: ending, request_id: id });
  }

  /** Closes the socket without a callback. */
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
      this.#end(1002, "the message is not an event of this protocol");
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
   * Fails all unanswered exchanges: the server could not parse a message of one of them.
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
   * Ends a socket on which no frame arrives although exchanges run. Programs do not see the
   * server's pings, so this sends an invalid message, which the server answers with an error.
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
