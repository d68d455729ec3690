// A socket class whose server is the test, and timers that fire when they are told to.

/** All sockets that a client made, in order, and what it sent. */
export class StubServer {
  sockets = [];

  constructor() {
    const server = this;
    this.WebSocket = class extends EventTarget {
      readyState = 0;
      sent = [];

      constructor(url, protocols) {
        super();
        Object.assign(this, { url, protocols });
        server.sockets.push(this);
      }

      send(text) {
        this.sent.push(JSON.parse(text));
      }

      close() {
        this.readyState = 3;
      }

      // What the server does

      open() {
        this.readyState = 1;
        this.dispatchEvent(new Event("open"));
      }

      say(...events) {
        for (const event of events) this.raw(JSON.stringify(event));
      }

      raw(data) {
        this.dispatchEvent(Object.assign(new Event("message"), { data }));
      }

      end(code, reason = "") {
        this.readyState = 3;
        this.dispatchEvent(Object.assign(new Event("close"), { code, reason }));
      }
    };
  }

  get last() {
    return this.sockets.at(-1);
  }
}

/** A clock that stands still between calls of `pass`. */
export class StubTimers {
  #now = 0;
  #timers = new Map();
  #numTimers = 0;

  setTimeout = (callback, ms) => {
    this.#numTimers += 1;
    this.#timers.set(this.#numTimers, { callback, due: this.#now + ms });
    return this.#numTimers;
  };

  clearTimeout = (id) => this.#timers.delete(id);

  /** Lets so much time pass; timers fire in order. */
  pass(ms) {
    const end = this.#now + ms;
    for (;;) {
      const next = [...this.#timers].sort((a, b) => a[1].due - b[1].due)[0];
      if (next === undefined || next[1].due > end) break;
      this.#timers.delete(next[0]);
      this.#now = next[1].due;
      next[1].callback();
    }
    this.#now = end;
  }

  get size() {
    return this.#timers.size;
  }
}
