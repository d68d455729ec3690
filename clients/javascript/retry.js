// What a request does about an error that may pass, and about the end of its socket.

/** The server did nothing and is about to go: another one, or the next one, may do it. */
const LEAVING = new Set(["draining", "migrated", "store_taken"]);

/**
 * What may stand in the way of a request that is sent again, and passes: a lack of room, or
 * what the server still has of the first time.
 */
const PASSING = new Set([
  ...["key_in_use", "session_attached"],
  ...["queue_full", "rate_limited", "capacity_exhausted", "out_of_memory"],
  ...["store_failed", "store_full", "store_lost", "session_elsewhere"],
]);
const FIRST_DELAY_S = 0.5;
const LONGEST_DELAY_S = 15;

/** How often a request was sent again since it last came further. */
export class Tries {
  /** @param {number} max */
  constructor(max) {
    this.max = max;
    this.count = 0;
  }

  /** Whether there is one more, which this takes. */
  take() {
    if (this.count >= this.max) return false;
    this.count += 1;
    return true;
  }

  /**
   * What an error frame means: "move", seconds to wait, or null where the request has failed.
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

/** A unique name for a piece of work. */
export function newKey() {
  const numbers = new Uint32Array(4);
  // Without a secure random source, as in Node 18, any other will do: it is not a secret.
  if (globalThis.crypto) crypto.getRandomValues(numbers);
  else numbers.forEach((_, i) => (numbers[i] = Math.random() * 2 ** 32));
  return `js-${[...numbers].map((n) => n.toString(16).padStart(8, "0")).join("")}`;
}
