// What a session has read and written, as pieces that know where they lie in it.

/**
 * A piece of text. `start` and `end` are positions: the session had `start` tokens before it and
 * has `end` after it. `end` is null until the server has told it. Of several tokens whose text
 * became whole together, `logprob` is the sum, and `top` is empty.
 *
 * @typedef {object} Piece
 * @property {"prompt" | "token" | "break"} kind
 * @property {string} text
 * @property {number} start
 * @property {number | null} end
 * @property {number | null} logprob
 * @property {{token_id: number, logprob: number}[]} top
 */

/** Stands for text that was written before the page was opened and is no longer kept. */
const UNKNOWN = " … ";

/** The pieces of one session, in order. */
export class Transcript {
  /** @type {Piece[]} */
  pieces = [];
  position = 0;
  /** @type {Map<number, string>} texts by the position at which they begin, that no event has */
  prompts = new Map();
  #held = null; // tokens that have no text yet

  /** The reader's own words; how many tokens they are is known with the next event. */
  addPrompt(text) {
    this.#held = null;
    this.pieces.push({ ...blank("prompt", text, this.position), end: null });
  }

  /** One text has ended, and another begins. */
  addBreak() {
    this.pieces.push(blank("break", "", this.position));
  }

  /** A token that the server sent. */
  addToken({ position, text, logprob, top_logprobs: top }) {
    this.#settlePrompt(position);
    const held = this.#held;
    const piece = {
      kind: "token",
      text,
      start: held?.start ?? position,
      end: position + 1,
      logprob: logprob === undefined ? null : (held?.logprob ?? 0) + logprob,
      top: held === null ? (top ?? []) : [],
    };
    this.position = position + 1;
    this.#held = text === "" ? piece : null;
    if (text !== "") this.pieces.push(piece);
  }

  /** The end of a generation, with what was held back of its text. */
  finish({ position, text }) {
    this.#settlePrompt(position);
    if (text) {
      const held = this.#held ?? blank("token", "", position);
      this.pieces.push({ ...held, text, end: position });
    }
    this.#held = null;
    this.position = position;
  }

  /** The server has read everything so far, and is at `position`. */
  settle(position) {
    this.#settlePrompt(position);
    this.position = position;
  }

  /** A transcript of its own, of what lies before position `at`. */
  copy(at) {
    const copy = new Transcript();
    copy.pieces = this.pieces.slice(0, this.countUpTo(at));
    copy.position = at;
    return copy;
  }

  /** Forgets what lies after position `at`. */
  truncate(at) {
    this.pieces.length = this.countUpTo(at);
    this.position = at;
    this.#held = null;
  }

  /** Forgets the first `count` pieces; positions stay as they are. */
  dropFirst(count) {
    this.pieces.splice(0, count);
  }

  /** How many pieces lie wholly before position `at`. */
  countUpTo(at) {
    let low = 0;
    let high = this.pieces.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.pieces[middle].end ?? Infinity) <= at) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** What the session has read since its last event ends at `position`. */
  #settlePrompt(position) {
    const last = this.pieces.at(-1);
    if (last?.kind === "prompt" && last.end === null) {
      last.end = position;
    } else if (position > this.position) {
      const text = this.prompts.get(this.position) ?? UNKNOWN;
      this.pieces.push({ ...blank("prompt", text, this.position), end: position });
      this.#held = null;
    }
  }
}

/**
 * Where two transcripts part: how many pieces of `a`, and how many of `b`, come before that
 * place. Where the beginning of one is no longer kept, the other is compared from there on.
 */
export function numCommon(a, b) {
  const begin = Math.max(a.pieces[0]?.start ?? 0, b.pieces[0]?.start ?? 0);
  let [i, j] = [a, b].map(({ pieces }) => Math.max(0, pieces.findIndex(({ start }) => start >= begin)));
  for (; i < a.pieces.length && j < b.pieces.length; i += 1, j += 1) {
    const [one, other] = [a.pieces[i], b.pieces[j]];
    if (one !== other && (one.kind !== other.kind || one.text !== other.text)) break;
  }
  return [i, j];
}

/** Whether the server can go back to the end of a piece. */
export function isReachable(piece) {
  return piece.kind !== "break" && piece.end !== null;
}

function blank(kind, text, at) {
  return { kind, text, start: at, end: at, logprob: null, top: [] };
}
