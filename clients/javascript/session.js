// A kept session, which uses constant memory on the server until it is deleted or expires.

import { newKey } from "./retry.js";

/**
 * A kept session. `Client.createSession`, `Client.session`, `Client.importSession` and `fork`
 * return one. `listed` is the session as it was when `Client.sessions` listed it.
 */
export class Session {
  #ask;
  #http;

  /**
   * @param {import("./everstream.js").Client} client
   * @param {string} id
   * @param {(kind: string, message: Record<string, unknown>) => Promise<any>} ask
   * @param {import("./http.js").Http} http
   * @param {import("./events.js").ListedSession} [listed]
   */
  constructor(client, id, ask, http, listed) {
    this.client = client;
    this.id = id;
    this.listed = listed;
    this.#ask = ask;
    this.#http = http;
  }

  /**
   * Starts to generate a continuation of the session's text followed by `prompt`.
   * @param {string | number[]} [prompt] text or token ids
   * @param {import("./events.js").SessionGenerateOptions} [options]
   * @returns {import("./generation.js").Generation}
   */
  generate(prompt = "", options = {}) {
    return this.client.complete(prompt, { ...options, session: this.id });
  }

  /**
   * Feeds text or token ids to the session without generating. With `logprobs` the answer has the
   * log-probability of each token. `idempotency_key` is the caller's name for this work: the
   * server reads the text once and answers each request with the same key.
   *
   * @param {string | number[]} text
   * @param {{logprobs?: boolean, idempotency_key?: string}} [options]
   * @returns {Promise<import("./events.js").Appended>}
   */
  append(text, { logprobs, idempotency_key = newKey() } = {}) {
    const fed = typeof text === "string" ? { text } : { tokens: text };
    const options = { session: this.id, logprobs, idempotency_key };
    return this.#ask("appended", { type: "append", ...options, ...fed });
  }

  /**
   * Returns `n` copies of the session as it is, or as it was at `at` tokens.
   * @param {number} [n]
   * @param {number} [at]
   * @returns {Promise<Session[]>}
   */
  async fork(n = 1, at = undefined) {
    const forked = await this.#ask("forked", { type: "fork", session: this.id, n, at });
    return forked.sessions.map((/** @type {string} */ id) => this.client.session(id));
  }

  /**
   * Cuts the text back to its first `at` tokens. The session gets a new epoch.
   * @param {number} at
   * @returns {Promise<import("./events.js").Rewound>}
   */
  rewind(at) {
    return this.#ask("rewound", { type: "rewind", session: this.id, at });
  }

  /**
   * Ends the session's running request, even if another client reads it.
   * @returns {Promise<import("./events.js").SessionInfo>}
   */
  cancel() {
    return this.#http.json("POST", `${this.#path}/cancel`);
  }

  /**
   * Returns the session's position, epoch, idle time and size.
   * @returns {Promise<import("./events.js").SessionInfo>}
   */
  info() {
    return this.#http.json("GET", this.#path);
  }

  /**
   * Returns the text that the session has read and generated, from token `start` on, by default
   * from the oldest token in the log. Throws `HistoryGone` if the log begins after `start`.
   * @param {number} [start]
   * @returns {Promise<import("./events.js").SessionText>}
   */
  async text(start) {
    const text = await this.#textFrom(start);
    const { position } = text; // stop here: a running request may extend the text without an end
    for (let page = text; page.parts.length && page.end < position; ) {
      page = await this.#textFrom(page.end);
      text.parts.push(...page.parts);
      Object.assign(text, { end: page.end, position: page.position });
    }
    return text;
  }

  /** Returns the session as it is now, as a signed file. */
  export() {
    return this.#http.bytes(`${this.#path}/export`);
  }

  /** Deletes the session on the server. */
  async delete() {
    await this.#ask("deleted", { type: "delete", session: this.id });
  }

  /**
   * @param {number} [start]
   * @returns {Promise<import("./events.js").SessionText>}
   */
  #textFrom(start) {
    return this.#http.json("GET", `${this.#path}/text${start === undefined ? "" : `?start=${start}`}`);
  }

  get #path() {
    return `/v1/sessions/${encodeURIComponent(this.id)}`;
  }
}
