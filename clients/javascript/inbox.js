// Events that have arrived and are not read yet.

/** Events that have been read and are still held, where more wait behind them. */
const MAX_READ = 4096;

/**
 * A queue with one end to wait at.
 * @template T
 */
export class Inbox {
  /** @type {T[]} */
  #unread = [];
  #numRead = 0; // of `unread`: shifting a long array would copy it
  /** @type {{resolve: (event: T | null) => void, reject: (error: unknown) => void}[]} */
  #waiters = [];
  #isEnded = false;
  /** @type {{error: unknown} | null} */
  #failure = null;

  /** How many events wait to be read. */
  get size() {
    return this.#unread.length - this.#numRead;
  }

  /**
   * Gives an event to whoever waits for it, or keeps it. One that comes after the end is dropped.
   * @param {T} event
   */
  push(event) {
    if (this.#isEnded) return;
    const waiter = this.#waiters.shift();
    if (waiter === undefined) this.#unread.push(event);
    else waiter.resolve(event);
  }

  /**
   * The next event, or null after the last one. An error that ended it is thrown once.
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

  /** Forgets what has not been read. */
  discard() {
    this.#unread = [];
    this.#numRead = 0;
  }

  #forgetRead() {
    this.#unread = this.#unread.slice(this.#numRead);
    this.#numRead = 0;
  }

  /** No more events come, */
  end() {
    this.#isEnded = true;
    for (const { resolve } of this.#waiters.splice(0)) resolve(null);
  }

  /**
   * because of an error.
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
