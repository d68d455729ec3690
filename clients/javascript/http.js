// The HTTP part of the protocol.

import { ConnectionLost, ProtocolError, errorOf } from "./errors.js";

const SESSION_TYPE = "application/vnd.everstream.session";

/** Sends the HTTP requests of a client with its key. */
export class Http {
  /**
   * @param {string} baseUrl without a trailing slash
   * @param {() => string | null} key
   * @param {typeof fetch} fetch
   * @param {number} timeoutS
   */
  constructor(baseUrl, key, fetch, timeoutS) {
    this.baseUrl = baseUrl;
    this.key = key;
    this.fetch = fetch;
    this.timeoutS = timeoutS;
  }

  /**
   * Sends a request and returns the JSON of the answer.
   * @param {string} method
   * @param {string} path
   * @param {BodyInit} [body] an exported session
   * @returns {Promise<any>}
   */
  async json(method, path, body) {
    const response = await this.#ask(method, path, body);
    try {
      return await response.json();
    } catch {
      throw new ProtocolError(`${path}: the answer is not JSON`);
    }
  }

  /**
   * Sends a request and returns the bytes of the answer.
   * @param {string} path
   * @returns {Promise<Uint8Array>}
   */
  async bytes(path) {
    return new Uint8Array(await (await this.#ask("GET", path)).arrayBuffer());
  }

  /** @param {string} method @param {string} path @param {BodyInit} [body] */
  async #ask(method, path, body) {
    const key = this.key();
    /** @type {Record<string, string>} */
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["Content-Type"] = SESSION_TYPE;
    const signal = AbortSignal.timeout(this.timeoutS * 1000);
    const { fetch } = this; // browsers require a call without `this`
    let response;
    try {
      response = await fetch(this.baseUrl + path, { method, headers, body, signal, cache: "no-store" });
    } catch (error) {
      throw new ConnectionLost(`no answer from ${this.baseUrl}: ${/** @type {Error} */ (error).message}`);
    }
    if (response.ok) return response;
    const answer = await response.json().catch(() => null);
    throw errorOf(response.status, answer, response.headers.get("Retry-After"));
  }
}
