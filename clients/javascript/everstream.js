// The JavaScript client for browsers and Node.
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
 * The options of a client. All are optional.
 *
 * `timeoutS`: a connection with running requests counts as lost after so many seconds without an
 * event; also bounds each HTTP call. `maxTries`: how many retries in a row may fail to reach the
 * server before the waiting requests fail, and how often a request is sent again without progress;
 * 0 disables recovery. `maxUnread`: the bound on unread events of one generation. `WebSocket`: the
 * class to use, required before Node 22, for example that of the package `ws`. `fetch`, `timers`
 * and `random` are for tests.
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

/** A client of one server, with any number of concurrent generations over one WebSocket. */
export class Client {
  /** The key for the next connection and the next HTTP request. */
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
   * Connects now, even if a retry is scheduled, and stays connected until `close`. Without this
   * call the client connects at its first request. `onStatus` reports the progress.
   */
  connect() {
    this.#connection.connect();
  }

  /** Closes the connection. Requests on kept sessions continue: see `resume`. */
  close() {
    this.#connection.close();
  }

  /**
   * Starts a generation in a new session, or in `options.session`.
   * @param {string | number[]} [prompt] text or token ids
   * @param {GenerateOptions} [options]
   * @returns {Generation}
   */
  complete(prompt = "", options = {}) {
    const { signal, ...fields } = options;
    const isKept = fields.session !== undefined || fields.keep === true;
    // With a unique key the server executes it once, however often it is sent.
    if (isKept) fields.idempotency_key ??= newKey();
    return this.#stream({ type: "generate", prompt, ...fields }, isKept, false, signal);
  }

  /**
   * Returns the events of a session after a cursor: missed events, then live ones. They may
   * belong to several generations, and end with the running request, or with the last event if
   * the session is idle. If the events are not available or the epoch is an earlier one, the
   * first event is a `reset`.
   *
   * @param {string} session its id
   * @param {{last_seq: number, epoch?: string, take_over?: boolean, signal?: AbortSignal}} cursor
   *   `last_seq` is 0 for all events; `take_over` replaces another reader of the session
   * @returns {Generation}
   */
  resume(session, { last_seq, epoch, take_over, signal }) {
    const message = { type: "resume", session, last_seq, epoch, take_over };
    return this.#stream(message, true, true, signal);
  }

  /**
   * Creates a kept session of `model`, by default the first one: empty, or with the named state
   * `state`.
   * @param {{model?: string, state?: string}} [options]
   */
  async createSession({ model, state } = {}) {
    const created = await this.#ask("created", { type: "create", model, state });
    return this.session(created.session);
  }

  /**
   * Returns an existing session by its id, without a request to the server.
   * @param {string} id
   */
  session(id) {
    return new Session(this, id, this.#ask.bind(this), this.#http);
  }

  /**
   * Creates a session from a file of `Session.export`, of this or another server.
   * @param {BufferSource | Blob} file
   */
  async importSession(file) {
    const imported = await this.#http.json("POST", "/v1/sessions/import", file);
    return this.session(imported.session);
  }

  /**
   * Iterates over the caller's kept sessions in the order of their ids. Their `listed` is what
   * the server says of them. Each request to it returns at most `pageSize` of them.
   * @param {number} [pageSize]
   * @returns {AsyncGenerator<Session, void, undefined>}
   */
  async *sessions(pageSize = 100) {
    let after = "";
    for (;;) {
      const page = await this.#http.json("GET", `/v1/sessions?limit=${pageSize}${after}`);
      for (const listed of page.data) {
        yield new Session(this, listed.session, this.#ask.bind(this), this.#http, listed);
      }
      if (!page.has_more || page.data.length === 0) return;
      after = `&after=${encodeURIComponent(page.data.at(-1).session)}`;
    }
  }

  /**
   * Returns the models that are served.
   * @returns {Promise<Model[]>}
   */
  async models() {
    return (await this.#http.json("GET", "/v1/models")).data;
  }

  /** Returns whether the server is alive. */
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
