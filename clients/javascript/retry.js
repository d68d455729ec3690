// Decides whether a request is sent again after a transient error or the end of its socket.

/** The server is about to stop, or the session has left it: retry over another connection. */
const LEAVING = new Set(["draining", "migrated", "store_taken"]);

/**
 * Transient errors of a request that is sent again: a lack of capacity, or the server still has
 * the previous connection as its reader.
 */
const PASSING = new Set([
  ...["key_in_use", "session_attached"],
  ...["queue_full", "rate_limited", "capacity_exhausted", "out_of_memory"],
  ...["store_failed", "store_full", "store_lost", "session_elsewhere"],
]);
const FIRST_DELAY_S = 0.5;
const LONGEST_DELAY_S = 15;

/** Counts how often a request was sent again since its last progress. */
export class Tries {
  /** @param {number} max */
  constructor(max) {
    this.max = max;
    this.count = 0;
  }

  /** Counts one more try. Returns false if there is none left. */
  take() {
    if (this.count >= this.max) return false;
    this.count += 1;
    return true;
  }

  /**
   * Returns what to do after an error frame: "move", the seconds to wait before a retry, or null
   * if the request has failed.
   * @param {any} event
   * @returns {"move" | number | null}
   */
  verdict(event) {
    const { code, retry_after_s: afterS } = event.error ?? {};
    if (LEAVING.has(code)) return this.take() ? "move" : null;
    if (this.count === 0 || !PASSING.has(code)) return null;
    if (!this.take()) return null;
    return afterS ?? Math.min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (this.count - 2));
  }
}

/** Returns a unique idempotency key. */
export function newKey() {
  const numbers = new Uint32Array(4);
  // Node 18 has no global secure random source. The key is not a secret, so any source will do.
  if (globalThis.crypto) crypto.getRandomValues(numbers);
  else numbers.forEach((_, i) => (numbers[i] = Math.random() * 2 ** 32));
  return `js-${[...numbers].map((n) => n.toString(16).padStart(8, "0")).join("")}`;
}
