// Speed as the reader sees it: time to first token, and tokens per second.

const WINDOW_MS = 1500;

/** Measures one request. Times are milliseconds of `performance.now()`. */
export class Meter {
  constructor(sentAt) {
    this.sentAt = sentAt;
    this.firstAt = null;
    this.lastAt = null;
    this.tokens = 0;
    this.marks = [];
  }

  /** Counts one token that arrived at `now`. */
  token(now) {
    this.firstAt ??= now;
    this.lastAt = now;
    this.tokens += 1;
  }

  /** Milliseconds from sending to the first token, or null before it. */
  get firstTokenMs() {
    return this.firstAt === null ? null : this.firstAt - this.sentAt;
  }

  /** Tokens per second of the last moment; call once per frame. Null until it can be told. */
  currentRate(now) {
    this.marks.push({ at: now, tokens: this.tokens });
    while (this.marks.length > 2 && now - this.marks[1].at >= WINDOW_MS) this.marks.shift();
    const oldest = this.marks.find((mark) => mark.tokens > 0);
    if (!oldest || now - oldest.at < 100) return null;
    return ((this.tokens - oldest.tokens) / (now - oldest.at)) * 1000;
  }

  /** Tokens per second from the first token to the last. Null with fewer than two. */
  meanRate() {
    if (this.tokens < 2 || this.lastAt === this.firstAt) return null;
    return ((this.tokens - 1) / (this.lastAt - this.firstAt)) * 1000;
  }
}
