// One session of the page: what runs in it, what it has written, and how it is shown.

import { EverstreamError, HistoryGone, InternalServerError, SessionAttached, SessionNotFound } from "./client/everstream.js";
import { formatCount } from "./format.js";
import { generationIn, Run } from "./run.js";
import { SpeedSeries } from "./speed.js";
import { isReachable, Transcript } from "./transcript.js";

/** How many pieces of text a pane shows at most, and how many stay when it is shortened. */
const MAX_PIECES = 24_000;
const KEPT_PIECES = 20_000;

/** `view` is a `PaneView`, and `onChange(pane)` is called after every change here. */
export class Pane {
  session = null;
  run = null;
  meter = null;
  atEndOfText = false;
  summary = "";
  opening = "";
  lineage = []; // sessions that this one is a copy of, nearest first: {id, at}
  again = null; // the sampling with which an endless generation starts again
  unsent = ""; // a prompt that the server has refused
  transcript = new Transcript();
  series = new SpeedSeries();

  constructor({ name, server, model, view, onChange }) {
    this.name = name;
    this.server = server;
    this.model = model;
    this.view = view;
    this.onChange = () => onChange(this);
  }

  get isEmpty() {
    return this.transcript.pieces.length === 0;
  }

  /** The whole text on the page. */
  get text() {
    return this.transcript.pieces.map(({ kind, text }) => (kind === "break" ? "\n\n" : text)).join("");
  }

  /** Whether nothing has been asked of it yet. */
  get isUnused() {
    return this.isEmpty && this.session === null && this.run === null;
  }

  /** Takes a copy of another pane's session as its own, which left that one at position `at`. */
  adopt(session, origin, at) {
    this.session = session;
    this.lineage = [{ id: origin.session.id, at }, ...origin.lineage];
    this.model = origin.model;
    this.opening = origin.opening;
    this.transcript = origin.transcript.copy(at);
    this.series = origin.series.copy(at);
    this.view.showOrigin(origin.name, at, this.transcript.pieces);
    this.onChange();
  }

  /**
   * Goes on with the session, or opens one; an empty `prompt` continues. An endless one starts
   * again whenever its tokens are used up or a text has ended, until it is stopped.
   */
  generate(prompt, sampling, isEndless = false) {
    if (this.run) return;
    if (!this.session) this.#forget();
    this.again = isEndless ? sampling : null;
    this.#begin(prompt, sampling);
  }

  #begin(prompt, sampling, meter = undefined) {
    if (this.isEmpty) this.opening = prompt;
    else if (this.atEndOfText) this.#append(() => this.transcript.addBreak());
    if (prompt) {
      this.#append(() => this.transcript.addPrompt(prompt));
      this.view.story.follow();
    }
    this.atEndOfText = false;
    this.summary = "";
    this.view.hideNotes();
    this.run = new Run(this, generationIn(this, prompt, sampling), this.#watcher, meter);
    this.meter = this.run.meter;
    this.series.pause();
    this.onChange();
  }

  /**
   * Shows a session that was there before the page was opened, and what it still runs. `lineage`
   * is what it is a copy of, `past` the text of that, which the page calls `origin`. Returns when
   * all that was there is shown.
   */
  async restore({ id, lineage }, past, origin) {
    this.session = this.server.client.session(id);
    this.lineage = lineage;
    this.transcript = past;
    if (lineage.length) this.view.showOrigin(origin, lineage[0].at, past.pieces);
    const { seq, position, model } = await this.#info();
    this.model = (await this.server.modelNamed(model)) ?? this.model;
    past.prompts = await this.server.promptsOf(id, Math.max(0, position - KEPT_PIECES));
    const cursor = { last_seq: Math.max(0, seq - KEPT_PIECES), take_over: true };
    this.run = new Run(this, this.server.client.resume(id, cursor), this.#watcher);
    this.meter = this.run.meter;
    await this.run.reachedPresent;
  }

  /** What the server says of the session; a session that is gone has had no events. */
  #info() {
    return this.session.info().catch((error) => {
      if (error instanceof EverstreamError) return { seq: 0, position: 0 };
      throw error;
    });
  }

  /** Cancels what runs; what was written stays. */
  stop() {
    this.again = null;
    this.run?.stop();
  }

  /** A copy of the session as it was at position `at`. */
  async fork(at) {
    const [copy] = await this.session.fork(1, at);
    return copy;
  }

  /** Lets the session read one token, whose text is shown as the reader's own. */
  async feed(token, text) {
    try {
      const { position } = await this.session.append([token]);
      this.#append(() => this.transcript.addPrompt(text));
      this.transcript.settle(position);
    } catch (error) {
      this.explain(error);
    }
    this.onChange();
  }

  /** Cuts the text back to position `at`, ending what runs. */
  async rewind(at) {
    this.stop();
    await this.run?.done;
    if (!this.session || at >= this.transcript.position) return;
    try {
      await this.session.rewind(at);
    } catch (error) {
      this.explain(error, at);
      return;
    }
    this.transcript.truncate(at);
    this.series.truncate(at);
    this.view.story.truncate(this.transcript.pieces.length);
    this.meter = null;
    this.atEndOfText = false;
    this.summary = `Back at token ${formatCount(at)}`;
    this.view.hideNotes();
    this.onChange();
  }

  /** Forgets everything here and frees the session on the server. */
  reset() {
    if (this.run) this.run.abandon();
    else if (this.session) this.server.free(this.session);
    this.#forget();
    this.onChange();
  }

  /** The socket has ended: what runs goes on over the next one. */
  connectionLost() {
    if (this.run) this.run.wasLost = true;
    this.series.pause();
  }

  /** Says what went wrong, where it was asked to go back to position `at`. */
  explain(error, at = Infinity) {
    if (error instanceof SessionNotFound) {
      this.#sessionGone();
    } else if (error instanceof SessionAttached) {
      this.view.showNotice("This session is read in another tab or by somebody else. Reload the page to read on here.");
    } else if (error instanceof HistoryGone && at < this.lineage[0]?.at) {
      const begins = formatCount(this.lineage[0].at);
      this.view.showNotice(`This copy begins at token ${begins}. Fork or rewind what is before that where it was copied.`);
    } else {
      this.view.showNotice(error.message);
      if (!(error instanceof EverstreamError)) console.error(error);
    }
    this.onChange();
  }

  /** Whether the session can go back to the end of `piece`. */
  canReach(piece) {
    return this.session !== null && isReachable(piece);
  }

  #watcher = {
    begun: (session) => {
      this.session = session;
      this.onChange();
    },
    token: (event, run) => {
      const now = performance.now();
      if (run.wasLost) this.view.showTakenUp(event.position);
      if (event.seq > run.lastPastSeq) {
        run.meter.token(now);
        this.series.add(event.position, now);
      }
      this.#append(() => this.transcript.addToken(event));
      this.onChange();
    },
    finished: (event, run) => {
      this.#append(() => this.transcript.finish(event));
      this.atEndOfText = event.finish_reason === "stop";
      if (event.finish_reason === "cancelled" || event.finish_reason === "error") this.again = null;
      this.summary = summaryOf(event, run);
    },
    reset: (event) => {
      if (event.position === 0) {
        this.#sessionGone();
      } else {
        this.view.showNotice(`A part of the text cannot be shown: ${event.reason}.`);
      }
    },
    failed: (error) => {
      this.again = null;
      this.#takeBackPrompt();
      if (error instanceof InternalServerError && this.session) {
        // What has failed once would fail again: the next text begins anew.
        this.server.free(this.session);
        this.session = null;
      }
      this.explain(error);
    },
    over: (run) => {
      if (this.run === run) this.run = null;
      if (this.again && !this.run) this.#begin("", this.again, run.meter);
      this.onChange();
    },
  };

  /** What the server has not taken is not a part of the text. */
  #takeBackPrompt() {
    const last = this.transcript.pieces.at(-1);
    if (last?.kind !== "prompt" || last.end !== null) return;
    this.unsent = last.text;
    this.transcript.pieces.pop();
    this.view.story.truncate(this.transcript.pieces.length);
  }

  #forget() {
    Object.assign(this, { session: null, run: null, meter: null, again: null, lineage: [], atEndOfText: false, summary: "" });
    this.transcript = new Transcript();
    this.series = new SpeedSeries();
    this.view.clear();
  }

  #sessionGone() {
    this.session = null;
    this.view.showNotice("The server no longer has this session. Generate begins a new one.");
  }

  #append(add) {
    const { pieces } = this.transcript;
    const before = pieces.length;
    add();
    this.view.story.append(...pieces.slice(before));
    if (pieces.length > MAX_PIECES) this.#shorten();
  }

  /** Takes the oldest part of a long text off the page; the session on the server stays whole. */
  #shorten() {
    const count = this.view.story.dropFirst(this.transcript.pieces.length - KEPT_PIECES);
    this.transcript.dropFirst(count);
  }
}

function summaryOf({ finish_reason: reason, usage }, { seed }) {
  const how = { stop: "End of the text", cancelled: "Stopped", error: "Broken off" }[reason];
  const tokens = usage.completion_tokens;
  const count = `${formatCount(tokens)} ${tokens === 1 ? "token" : "tokens"}`;
  const parts = [how, count, seed === null ? "" : `seed ${seed}`];
  return parts.filter(Boolean).join(", ");
}
