// The server that the page came from: one socket for all sessions, its models, its tokens' texts.

import { AuthenticationError, Client, EverstreamError, HistoryGone, SessionNotFound } from "./client/everstream.js";

const KEY_NAME = "everstream.key";
const POSSIBLE_KEY = /^[\x20-\x7e]*$/;

/**
 * Stays connected, and finds its way back.
 *
 * `onStatus` is told `{state}` as the client's is, with "key" (one is wanted; `rejected` says
 * whether one was tried) in place of "refused". `onModels` gets the list of models each time.
 */
export class Server {
  #texts = new Map();

  constructor({ onStatus, onModels }) {
    this.onStatus = onStatus;
    this.onModels = onModels;
    this.models = []; // as the server has them
    this.isOpen = false;
    const url = new URL(".", document.baseURI);
    this.client = new Client(url, {
      apiKey: sessionStorage.getItem(KEY_NAME),
      maxTries: Infinity, // the reader sees how it goes, and may leave
      onStatus: (status) => this.#take(status),
    });
  }

  /** Connects now, also where a later try is planned. */
  connect() {
    this.client.connect();
  }

  /** Remembers the key for this tab and connects with it. */
  useKey(key) {
    if (!POSSIBLE_KEY.test(key)) {
      this.onStatus({ state: "key", rejected: true });
      return;
    }
    this.client.apiKey = key;
    sessionStorage.setItem(KEY_NAME, key);
    this.connect();
  }

  /** Deletes a session that is not needed any more; one that is already gone is no error. */
  async free(session) {
    await session.delete().catch((error) => {
      if (!(error instanceof SessionNotFound)) console.warn(error.message);
    });
  }

  /**
   * What a session has read from token `from` on, or as far as it is kept, by the position at
   * which each part begins.
   */
  async promptsOf(id, from = 0) {
    try {
      const { parts } = await this.#textFrom(this.client.session(id), from);
      return new Map(parts.filter(({ kind }) => kind === "input").map(({ start, text }) => [start, text]));
    } catch (error) {
      if (!(error instanceof EverstreamError)) throw error;
      return new Map(); // what the session's own events are answered says why
    }
  }

  #textFrom(session, from) {
    if (from === 0) return session.text();
    return session.text(from).catch((error) => {
      if (error instanceof HistoryGone) return session.text();
      throw error;
    });
  }

  /** The text of one token of a model; null where the server does not tell. */
  textOf(id, model) {
    const name = `${model} ${id}`;
    if (!this.#texts.has(name)) {
      this.#texts.set(name, this.#detokenize(id, model));
    }
    return this.#texts.get(name);
  }

  async #detokenize(id, model) {
    try {
      const body = JSON.stringify({ model, tokens: [id] });
      const response = await this.#request("detokenize", { method: "POST", body });
      return response.ok ? (await response.json()).prompt : null;
    } catch {
      return null;
    }
  }

  #request(path, options) {
    const headers = { "Content-Type": "application/json" };
    if (this.client.apiKey) headers.Authorization = `Bearer ${this.client.apiKey}`;
    return fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
  }

  #take(status) {
    this.isOpen = status.state === "open";
    if (status.state === "refused" && status.error instanceof AuthenticationError) {
      this.onStatus({ state: "key", rejected: Boolean(this.client.apiKey) });
      return;
    }
    this.onStatus(status);
    if (this.isOpen) this.#describe();
  }

  /** The model of this name as the server describes it, or undefined. */
  async modelNamed(name) {
    if (!this.models.length) this.models = await this.client.models();
    return this.models.find(({ id }) => id === name);
  }

  async #describe() {
    try {
      this.models = await this.client.models();
      this.onModels(this.models);
    } catch (error) {
      console.warn(error.message); // the socket says what becomes of the server
    }
  }
}
