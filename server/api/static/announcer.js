// Says what comes, to who listens instead of looks: politely, and not all the time.

const PAUSE_MS = 4000;
const MOST_CHARS = 400;

/** Speaks through `element`, an `aria-live` region, at most every four seconds. */
export class Announcer {
  #waiting = "";
  #timer = null;

  constructor(element) {
    this.element = element;
  }

  /** Queues text that streams in. Of too much, the end is spoken. */
  add(text) {
    this.#waiting = (this.#waiting + text).slice(-MOST_CHARS);
    this.#timer ??= setTimeout(() => this.#speak(), PAUSE_MS);
  }

  /** Speaks now, in the place of what waits. */
  say(words) {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#waiting = "";
    this.element.textContent = words;
  }

  #speak() {
    this.#timer = null;
    this.element.textContent = this.#waiting;
    this.#waiting = "";
  }
}
