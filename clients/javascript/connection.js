// Connects to the server, and reconnects when a socket has ended.

import { AuthenticationError, ConnectionLost, ReaderTooSlow } from "./errors.js";
import { Link } from "./link.js";

const PROTOCOL = "everstream.v1";
const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15_000;

/** Close codes after which the next connection may succeed. */
const PASSING_CODES = new Set([1001, 1005, 1006, 1011, 1012, 1013, 1015]);
const FORBIDDEN = 1008;
const TOO_LARGE = 1009;

/** @type {Record<number, string>} */
const REASONS = {
  1001: "the server went away",
  1005: "the connection was closed",
  1006: "the connection was lost",
  1009: "a message was too large",
  1011: "the server's engine has stopped",
  1012: "the server is restarting",
  1013: "the server is full",
  1015: "no secure connection could be made",
};

/**
 * @typedef {import("./link.js").Exchange} Exchange
 * @typedef {import("./link.js").Timers} Timers
 */

/**
 * The dependencies and settings of a connection.
 * @typedef {object} ConnectionParts
 * @property {string} url of the stream
 * @property {() => string | null} key
 * @property {typeof WebSocket} WebSocket
 * @property {Timers} timers
 * @property {() => number} random from 0 to 1
 * @property {number} timeoutS
 * @property {number} maxTries
 * @property {(status: import("./events.js").Status) => void} onStatus
 */

/** Runs exchanges over one socket, which is opened on demand and reconnected. */
export class Connection {
  /** @type {Link | null} */
  #link = null;
  /** @type {Set<Link>} links that the server drains, on which exchanges still run */
  #leaving = new Set();
  /** @type {Set<Exchange>} */
  #waiting = new Set();
  /** @type {Map<Exchange, any>} */
  #delayed = new Map();
  /** @type {any} */
  #retry = null;
  #failures = 0;
  #stays = false;
  #isClosed = false;

  /** @param {ConnectionParts} parts */
  constructor(parts) {
    this.parts = parts;
  }

  /** Connects now, even if a retry is scheduled, and stays connected. */
  connect() {
    this.#stays = true;
    if (this.#link === null && !this.#isClosed) this.#open();
  }

  /**
   * Sends an exchange as soon as there is a socket.
   * @param {Exchange} exchange
   */
  start(exchange) {
    if (this.#isClosed) {
      exchange.fail(new ConnectionLost("the client was closed"));
    } else if (this.#link?.isOpen) {
      this.#link.start(exchange);
    } else {
      this.#waiting.add(exchange);
      if (this.#link === null && this.#retry === null) this.#open();
    }
  }

  /**
   * Sends an exchange's `ending` on the link where it runs. A waiting exchange is sent with it.
   * @param {Exchange} exchange
   */
  requestEnd(exchange) {
    for (const link of this.#links()) link.requestEnd(exchange);
  }

  /**
   * Stops an exchange and ignores its further events.
   * @param {Exchange} exchange
   * @param {"cancel" | "detach"} ending the message that is sent if it runs
   */
  drop(exchange, ending) {
    this.#waiting.delete(exchange);
    this.parts.timers.clearTimeout(this.#delayed.get(exchange));
    this.#delayed.delete(exchange);
    for (const link of this.#links()) link.drop(exchange, ending);
  }

  /**
   * Whether an exchange has not been sent yet.
   * @param {Exchange} exchange
   */
  isWaiting(exchange) {
    return this.#waiting.has(exchange) || this.#delayed.has(exchange);
  }

  /** Closes the sockets and fails all exchanges. */
  close() {
    this.#isClosed = true;
    this.#stays = false;
    const links = this.#links();
    const ended = [...links.flatMap((link) => [...link.exchanges]), ...this.#delayed.keys()];
    for (const link of links) link.close();
    for (const timer of this.#delayed.values()) this.parts.timers.clearTimeout(timer);
    this.#link = null;
    this.#leaving.clear();
    this.#delayed.clear();
    for (const exchange of ended) exchange.fail(new ConnectionLost("the client was closed"));
    this.#failWaiting(new ConnectionLost("the client was closed"));
    this.#rest();
  }

  #links() {
    return this.#link === null ? [...this.#leaving] : [this.#link, ...this.#leaving];
  }

  #open() {
    const { timers, timeoutS, onStatus } = this.parts;
    timers.clearTimeout(this.#retry);
    this.#retry = null;
    onStatus({ state: "connecting" });
    const watcher = {
      opened: () => this.#opened(),
      heard: () => void (this.#failures = 0),
      resend: this.#resend.bind(this),
      ended: this.#ended.bind(this),
    };
    this.#link = new Link(this.#socket(), watcher, timers, timeoutS * 1000);
  }

  #socket() {
    const { url, key, WebSocket } = this.parts;
    const protocols = [PROTOCOL];
    const secret = key();
    if (secret) protocols.push(`everstream.key.${base64url(secret)}`);
    return new WebSocket(url, protocols);
  }

  #opened() {
    this.parts.onStatus({ state: "open" });
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const exchange of waiting) this.start(exchange);
  }

  /** @param {Link} link @param {Exchange} exchange @param {number | null} afterS */
  #resend(link, exchange, afterS) {
    const { timers } = this.parts;
    if (afterS !== null) {
      const again = () => {
        this.#delayed.delete(exchange);
        this.start(exchange);
      };
      this.#delayed.set(exchange, timers.setTimeout(again, afterS * 1000));
      return;
    }
    if (link === this.#link) {
      this.#link = null;
      this.#leaving.add(link);
      this.#waiting.add(exchange);
      this.#retryLater("the server is restarting");
    } else {
      this.start(exchange);
    }
    if (link.isIdle) {
      this.#leaving.delete(link);
      link.close();
    }
  }

  /** @param {Link} link @param {number} code @param {string} reason */
  #ended(link, code, reason) {
    const isCurrent = link === this.#link;
    if (isCurrent) this.#link = null;
    this.#leaving.delete(link);
    const error = endOf(code, reason);
    for (const exchange of [...link.exchanges]) {
      const goesOn = code === TOO_LARGE ? !exchange.isUnanswered : PASSING_CODES.has(code);
      if (!goesOn || !exchange.survives()) exchange.fail(error);
      else if (isCurrent) this.#waiting.add(exchange);
      else this.start(exchange);
    }
    if (!isCurrent) return;
    if (code === FORBIDDEN) {
      this.#stays = false;
      this.#failWaiting(error);
      this.parts.onStatus({ state: "refused", error });
    } else if (this.#waiting.size || this.#stays) {
      this.#retryLater(error.message);
    } else {
      this.#rest();
    }
  }

  /** @param {string} reason */
  #retryLater(reason) {
    const { timers, random, maxTries, onStatus } = this.parts;
    const longest = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#failures);
    this.#failures += 1;
    if (this.#failures > maxTries) this.#failWaiting(new ConnectionLost(reason));
    if (!this.#waiting.size && !this.#stays) {
      this.#rest();
      return;
    }
    const delayMs = longest * (0.5 + random() / 2);
    this.#retry = timers.setTimeout(() => this.#open(), delayMs);
    onStatus({ state: "waiting", reason, delayMs });
  }

  /** No exchange needs a connection: stops retrying. */
  #rest() {
    this.parts.timers.clearTimeout(this.#retry);
    this.#retry = null;
    this.#failures = 0;
    this.parts.onStatus({ state: "idle" });
  }

  /** @param {Error} error */
  #failWaiting(error) {
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const exchange of waiting) exchange.fail(error);
  }
}

/**
 * The error of the requests that end with their socket.
 * @param {number} code @param {string} reason
 */
function endOf(code, reason) {
  if (code === FORBIDDEN) {
    const kind = reason.includes("slowly") ? ReaderTooSlow : AuthenticationError;
    return new kind(reason || "the key was refused");
  }
  const why = reason || (REASONS[code] ?? `the connection was closed with code ${code}`);
  return new ConnectionLost(why);
}

/** @param {string} text */
function base64url(text) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(text));
  return btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
