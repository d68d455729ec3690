// One socket to the server that finds its way back: describe the model, open, retry.

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15_000;
const KEY_NAME = "everstream.key";
const POSSIBLE_KEY = /^[\x20-\x7e]*$/;

const CLOSE_REASONS = {
  1008: "The server closed the connection: the key was refused, or this page sent and did not read.",
  1009: "The server closed the connection: a message was too large.",
  1012: "The server is restarting.",
  1013: "The server has too many connections.",
};

function base64url(ascii) {
  return btoa(ascii).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/**
 * Keeps a WebSocket to `/v1/stream` open.
 *
 * `onStatus` is told `{state}` with state "connecting", "open", "key" (a key is
 * wanted; `rejected` says whether one was tried) or "waiting" (`reason` in
 * words, `delayMs` until the next try). `onModel` gets the server's model each
 * time, and `onEvent` every message.
 */
export class Connection {
  #socket = null;
  #timer = null;
  #trying = false;
  #failures = 0;

  constructor({ onStatus, onModel, onEvent }) {
    this.onStatus = onStatus;
    this.onModel = onModel;
    this.onEvent = onEvent;
    this.key = sessionStorage.getItem(KEY_NAME) ?? "";
  }

  /** Connects now, also when a later try is already planned. */
  async connect() {
    if (this.#socket || this.#trying) return;
    clearTimeout(this.#timer);
    this.#trying = true;
    this.onStatus({ state: "connecting" });
    const answer = await this.#describe();
    this.#trying = false;
    if (answer.keyWanted) {
      this.onStatus({ state: "key", rejected: this.key !== "" });
    } else if (answer.reason) {
      this.#retryLater(answer.reason);
    } else {
      this.onModel(answer.model);
      this.#open();
    }
  }

  /** Remembers the key for this tab and connects with it. */
  useKey(key) {
    this.key = key;
    sessionStorage.setItem(KEY_NAME, key);
    return this.connect();
  }

  /** Sends one message; says whether there was a connection to send it on. */
  send(message) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify(message));
    return true;
  }

  /** `fetch` of a path of this server, with the key. */
  request(path, options = {}) {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    return fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
  }

  async #describe() {
    if (!POSSIBLE_KEY.test(this.key)) return { keyWanted: true };
    try {
      const response = await this.request("v1/models");
      if (response.status === 401) return { keyWanted: true };
      if (!response.ok) return { reason: `The server answered with status ${response.status}.` };
      return { model: (await response.json()).data[0] };
    } catch {
      return { reason: "The server cannot be reached." };
    }
  }

  #open() {
    const url = new URL("v1/stream", document.baseURI);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const protocols = ["everstream.v1"];
    if (this.key) protocols.push(`everstream.key.${base64url(this.key)}`);
    const socket = new WebSocket(url, protocols);
    this.#socket = socket;
    let opened = false;
    socket.addEventListener("open", () => {
      opened = true;
      this.onStatus({ state: "open" });
    });
    socket.addEventListener("message", ({ data }) => {
      this.#failures = 0;
      this.onEvent(JSON.parse(data));
    });
    socket.addEventListener("close", ({ code }) => {
      this.#socket = null;
      const otherwise = opened ? "The connection was lost." : "The server refused the connection.";
      this.#retryLater(CLOSE_REASONS[code] ?? otherwise);
    });
  }

  #retryLater(reason) {
    const longest = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#failures);
    const delayMs = longest * (0.75 + Math.random() / 4);
    this.#failures += 1;
    this.#timer = setTimeout(() => this.connect(), delayMs);
    this.onStatus({ state: "waiting", reason, delayMs });
  }
}
