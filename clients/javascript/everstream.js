// The JavaScript client, for browsers and for Node.
//
//     const client = new Client("http://127.0.0.1:8000");
//     for await (const event of client.complete("Once upon a time", { max_tokens: 100 })) {
//       if (event.type === "token") process.stdout.write(event.text);
//     }

import { Ask } from "./ask.js";
import { Connection } from "./connection.js";
import { Generation } from "./generation.js";
import { Http } from "./http.js";
import { Session } from "./session.js";
import { newKey } from "./retry.js";
import { Stream } from "./stream.js";

export * from "./errors.js";
export { Generation, Session };

/**
 * @typedef {import("./events.js").Started} Started
 * @typedef {import("./events.js").Token} Token
 * @typedef {import("./events.js").Finished} Finished
 * @typedef {import("./events.js").Resumed} Resumed
 * @typedef {import("./events.js").Reset} Reset
 * @typedef {import("./events.js").Appended} Appended
 * @typedef {import("./events.js").Rewound} Rewound
 * @typedef {import("./events.js").Usage} Usage
 * @typedef {import("./events.js").GenerationEvent} GenerationEvent
 * @typedef {import("./events.js").Cursor} Cursor
 * @typedef {import("./events.js").Model} Model
 * @typedef {import("./events.js").SessionInfo} SessionInfo
 * @typedef {import("./events.js").SessionText} SessionText
 * @typedef {import("./events.js").TextPart} TextPart
 * @typedef {import("./events.js").ListedSession} ListedSession
 * @typedef {import("./events.js").Sampling} Sampling
 * @typedef {import("./events.js").GenerateOptions} GenerateOptions
 * @typedef {import("./events.js").SessionGenerateOptions} SessionGenerateOptions
 * @typedef {import("./events.js").Status} Status
 */

/**
 * All of it may be left out.
 *
 * `timeoutS`: silence after which a connection on which something is awaited counts as lost.
 * `maxTries`: how often in a row the server may be out of reach before what waits for it fails,
 * and how often a request is sent again without coming further; 0 never takes anything up again.
 * `maxUnread`: events of one generation that may wait to be read. `WebSocket`: needed before
 * Node 22, as the package `ws` has it. `fetch`, `timers` and `random` are for tests.
 *
 * @typedef {object} ClientOptions
 * @property {string | null} [apiKey]
 * @property {number} [timeoutS] 60
 * @property {number} [maxTries] 8
 * @property {number} [maxUnread] 16,384
 * @property {(status: Status) => void} [onStatus]
 * @property {any} [WebSocket]
 * @property {typeof fetch} [fetch]
 * @property {import("./link.js").Timers} [timers]
 * @property {() => number} [random]
 */

const MAX_UNREAD = 16_384;

/** @type {import("./link.js").Timers} */
const PLATFORM_TIMERS = {
  setTimeout: (callback, ms) => setTimeout(callback, ms),
  clearTimeout: (timer) => clearTimeout(timer),
};

/** A server, with any number of generations side by side over one socket. */
export class Client {
  /** The key of the next connection and of the next request over HTTP. */
  apiKey;
  #connection;
  #http;
  #limits;

  /**
   * @param {string | URL} url the server's address, such as `http://127.0.0.1:8000`
   * @param {ClientOptions} [options]
   */
  constructor(url, options = {}) {
    const { timeoutS = 60, maxTries = 8, maxUnread = MAX_UNREAD } = options;
    const socketClass = options.WebSocket ?? globalThis.WebSocket;
    if (socketClass === undefined) {
      throw new TypeError('there is no WebSocket here: give that of the package "ws", new Client(url, { WebSocket })');
    }
    const base = new URL(url);
    if (base.protocol !== "http:" && base.protocol !== "https:") {
      throw new TypeError(`url must be http://host[:port] or https://..., not ${url}`);
    }
    const path = base.host + base.pathname.replace(/\/+$/, "");
    /** @type {string | null} */
    this.apiKey = options.apiKey ?? null;
    this.#limits = { maxTries, maxUnread };
    const key = () => this.apiKey;
    const fetching = options.fetch ?? globalThis.fetch;
    this.#http = new Http(`${base.protocol}//${path}`, key, fetching, timeoutS);
    this.#connection = new Connection({
      url: `${base.protocol === "https:" ? "wss" : "ws"}://${path}/v1/stream`,
      key,
      WebSocket: socketClass,
      timers: options.timers ?? PLATFORM_TIMERS,
      random: options.random ?? Math.random,
      timeoutS,
      maxTries,
      onStatus: options.onStatus ?? (() => {}),
    });
  }

  /**
   * Connects now, also when a later try is planned, and stays connected until `close`. Without
   * it there is a connection when something wants one. `onStatus` tells how it goes.
   */
  connect() {
    this.#connection.connect();
  }

  /** Ends the connection. What runs in kept sessions goes on for a while: see `resume`. */
  close() {
    this.#connection.close();
  }

  /**
   * A generation in a new session, or in `options.session`. It starts at once.
   * @param {string | number[]} [prompt] text or token ids
   * @param {GenerateOptions} [options]
   * @returns {Generation}
   */
  complete(prompt = "", options = {}) {
    const { signal, ...fields } = options;
    const isKept = fields.session !== undefined || fields.keep === true;
    // With a key of its own it is done once, however often it has to be sent.
    if (isKept) fields.idempotency_key ??= newKey();
    return this.#stream({ type: "generate", prompt, ...fields }, isKept, false, signal);
  }

  /**
   * The events of a session after a cursor: those that were missed, then those to come, of one
   * generation or of several, to the end of what runs. A `reset` comes first where the events
   * are gone or the epoch is over.
   *
   * @param {string} session its id
   * @param {{last_seq: number, epoch?: string, take_over?: boolean, signal?: AbortSignal}} cursor
   *   `last_seq` 0 for all; `take_over` takes it from its present reader
   * @returns {Generation}
   */
  resume(session, { last_seq, epoch, take_over, signal }) {
    const message = { type: "resume", session, last_seq, epoch, take_over };
    return this.#stream(message, true, true, signal);
  }

  /**
   * A kept session, of `model` where several are served: empty, or with the named state `state`.
   * @param {{model?: string, state?: string}} [options]
   */
  async createSession({ model, state } = {}) {
    const created = await this.#ask("created", { type: "create", model, state });
    return this.session(created.session);
  }

  /**
   * A session by its id; nothing is asked of the server yet.
   * @param {string} id
   */
  session(id) {
    return new Session(this, id, this.#ask.bind(this), this.#http);
  }

  /**
   * A new session from what `Session.export` gave, here or on another server.
   * @param {BufferSource | Blob} file
   */
  async importSession(file) {
    const imported = await this.#http.json("POST", "/v1/sessions/import", file);
    return this.session(imported.session);
  }

  /**
   * All of the caller's kept sessions by id, those that sleep too.
   * @param {number} [pageSize]
   * @returns {AsyncGenerator<ListedSession, void, undefined>}
   */
  async *sessions(pageSize = 100) {
    let after = "";
    for (;;) {
      const page = await this.#http.json("GET", `/v1/sessions?limit=${pageSize}${after}`);
      yield* page.data;
      if (!page.has_more || page.data.length === 0) return;
      after = `&after=${encodeURIComponent(page.data.at(-1).session)}`;
    }
  }

  /**
   * The models that are served.
   * @returns {Promise<Model[]>}
   */
  async models() {
    return (await this.#http.json("GET", "/v1/models")).data;
  }

  /** Whether the server is alive. */
  async health() {
    return this.#http.json("GET", "/health").then(
      () => true,
      () => false,
    );
  }

  /** @param {string} kind @param {Record<string, unknown>} message */
  #ask(kind, message) {
    const ask = new Ask(kind, message, this.#limits.maxTries);
    this.#connection.start(ask);
    return ask.answer;
  }

  /**
   * @param {Record<string, unknown>} message
   * @param {boolean} isKept
   * @param {boolean} follows
   * @param {AbortSignal | undefined} signal
   */
  #stream(message, isKept, follows, signal) {
    const stream = new Stream(this.#connection, { message, isKept, follows }, this.#limits);
    if (signal?.aborted) stream.fail(signal.reason);
    else this.#connection.start(stream);
    return new Generation(stream, signal);
  }
}
