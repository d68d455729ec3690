// A kept session: constant memory on the server until it is deleted or expires.

import { newKey } from "./retry.js";

/** Made by `Client.createSession`, `Client.session`, `Client.importSession` and `fork`. */
export class Session {
  #ask;
  #http;

  /**
   * @param {import("./everstream.js").Client} client
   * @param {string} id
   * @param {(kind: string, message: Record<string, unknown>) => Promise<any>} ask
   * @param {import("./http.js").Http} http
   */
  constructor(client, id, ask, http) {
    this.client = client;
    this.id = id;
    this.#ask = ask;
    this.#http = http;
  }

  /**
   * Goes on with the session's text, after `prompt` if there is one. It starts at once.
   * @param {string | number[]} [prompt] text or token ids
   * @param {import("./events.js").SessionGenerateOptions} [options]
   * @returns {import("./generation.js").Generation}
   */
  generate(prompt = "", options = {}) {
    return this.client.complete(prompt, { ...options, session: this.id });
  }

  /**
   * Lets the session read `text`, or token ids, without generating. With `logprobs` the answer
   * says how probable each token was. What comes twice under one `idempotency_key` is read
   * once, and answered twice.
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
   * `n` copies, as the session is, or as it was when it had `at` tokens.
   * @param {number} [n]
   * @param {number} [at]
   * @returns {Promise<Session[]>}
   */
  async fork(n = 1, at = undefined) {
    const forked = await this.#ask("forked", { type: "fork", session: this.id, n, at });
    return forked.sessions.map((/** @type {string} */ id) => this.client.session(id));
  }

  /**
   * Cuts the text back to `at` tokens; the session's epoch is a new one.
   * @param {number} at
   * @returns {Promise<import("./events.js").Rewound>}
   */
  rewind(at) {
    return this.#ask("rewound", { type: "rewind", session: this.id, at });
  }

  /**
   * Ends what the session runs, also where it has no reader.
   * @returns {Promise<import("./events.js").SessionInfo>}
   */
  cancel() {
    return this.#http.json("POST", `${this.#path}/cancel`);
  }

  /**
   * Position, epoch, idle seconds and bytes.
   * @returns {Promise<import("./events.js").SessionInfo>}
   */
  info() {
    return this.#http.json("GET", this.#path);
  }

  /**
   * What it has read and generated, from token `start` on, or from the oldest that is kept.
   * @param {number} [start]
   * @returns {Promise<import("./events.js").SessionText>}
   */
  async text(start) {
    const text = await this.#textFrom(start);
    const { position } = text; // what is generated meanwhile may have no end
    for (let page = text; page.parts.length && page.end < position; ) {
      page = await this.#textFrom(page.end);
      text.parts.push(...page.parts);
      Object.assign(text, { end: page.end, position: page.position });
    }
    return text;
  }

  /** The session as it is now, as one signed file. */
  export() {
    return this.#http.bytes(`${this.#path}/export`);
  }

  /** Forgets it. */
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
