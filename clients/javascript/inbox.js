// The unread events of a generation.

/** The bound on events that have been read and are still held, because unread ones follow. */
const MAX_READ = 4096;

/**
 * A queue whose readers can wait for the next event.
 * @template T
 */
export class Inbox {
  /** @type {T[]} */
  #unread = [];
  #numRead = 0; // read events at the start of `#unread`: shifting a long array would copy it
  /** @type {{resolve: (event: T | null) => void, reject: (error: unknown) => void}[]} */
  #waiters = [];
  #isEnded = false;
  /** @type {{error: unknown} | null} */
  #failure = null;

  /** The number of unread events. */
  get size() {
    return this.#unread.length - this.#numRead;
  }

  /**
   * Passes an event to the first waiting reader, or holds it. After the end it is dropped.
   * @param {T} event
   */
  push(event) {
    if (this.#isEnded) return;
    const waiter = this.#waiters.shift();
    if (waiter === undefined) this.#unread.push(event);
    else waiter.resolve(event);
  }

  /**
   * Returns the next event, or null after the last one. An error that ended the queue is thrown
   * once.
   * @returns {Promise<T | null>}
   */
  next() {
    if (this.#numRead < this.#unread.length) {
      const event = this.#unread[this.#numRead++];
      if (this.#numRead === this.#unread.length) this.discard();
      else if (this.#numRead === MAX_READ) this.#forgetRead();
      return Promise.resolve(event);
    }
    const failure = this.#failure;
    if (failure !== null) {
      this.#failure = null;
      return Promise.reject(failure.error);
    }
    if (this.#isEnded) return Promise.resolve(null);
    return new Promise((resolve, reject) => this.#waiters.push({ resolve, reject }));
  }

  /** Discards the unread events. */
  discard() {
    this.#unread = [];
    this.#numRead = 0;
  }

  #forgetRead() {
    this.#unread = this.#unread.slice(this.#numRead);
    this.#numRead = 0;
  }

  /** Ends the queue after the unread events. */
  end() {
    this.#isEnded = true;
    for (const { resolve } of this.#waiters.splice(0)) resolve(null);
  }

  /**
   * Ends the queue with an error after the unread events.
   * @param {unknown} error
   */
  fail(error) {
    if (this.#isEnded) return;
    const waiter = this.#waiters.shift();
    if (waiter === undefined) this.#failure = { error };
    else waiter.reject(error);
    this.end();
  }
}
