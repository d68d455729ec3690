// One session of the page: what runs in it, what it has written, and how it is shown.

import { EverstreamError, InternalServerError, SessionNotFound } from "./client/everstream.js";
import { formatCount } from "./format.js";
import { Run } from "./run.js";
import { SpeedSeries } from "./speed.js";
import { isReachable, Transcript } from "./transcript.js";

/** `view` is a `PaneView`, and `onChange(pane)` is called after every change here. */
export class Pane {
  session = null;
  run = null;
  meter = null;
  atEndOfText = false;
  summary = "";
  opening = "";
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

  /** Takes a copy of another pane's session as its own, which left that one at position `at`. */
  adopt(session, origin, at) {
    this.session = session;
    this.model = origin.model;
    this.opening = origin.opening;
    this.transcript = origin.transcript.copy(at);
    this.series = origin.series.copy(at);
    this.view.showOrigin(origin.name, at, this.transcript.pieces);
    this.onChange();
  }

  /** Goes on with the session, or opens one; an empty `prompt` continues. */
  generate(prompt, sampling) {
    if (this.run) return;
    if (!this.session) this.#forget();
    if (this.isEmpty) this.opening = prompt;
    else if (this.atEndOfText) this.#append(() => this.transcript.addBreak());
    if (prompt) {
      this.#append(() => this.transcript.addPrompt(prompt));
      this.view.story.follow();
    }
    this.atEndOfText = false;
    this.summary = "";
    this.view.hideNotes();
    this.run = new Run(this, prompt, sampling, this.#watcher);
    this.meter = this.run.meter;
    this.series.pause();
    this.onChange();
  }

  /** Cancels what runs; what was written stays. */
  stop() {
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
    this.run?.stop();
    await this.run?.done;
    if (!this.session || at >= this.transcript.position) return;
    try {
      await this.session.rewind(at);
    } catch (error) {
      this.explain(error);
      return;
    }
    this.transcript.truncate(at);
    this.series.truncate(at);
    this.view.story.truncate(this.transcript.pieces.length);
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

  /** Says what went wrong. */
  explain(error) {
    if (error instanceof SessionNotFound) {
      this.#sessionGone();
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
      run.meter.token(now);
      this.series.add(event.position, now);
      this.#append(() => this.transcript.addToken(event));
      this.onChange();
    },
    finished: (event, run) => {
      this.#append(() => this.transcript.finish(event));
      this.atEndOfText = event.finish_reason === "stop";
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
    Object.assign(this, { session: null, run: null, meter: null, atEndOfText: false, summary: "" });
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
  }
}

function summaryOf({ finish_reason: reason, usage }, { seed }) {
  const how = { stop: "End of the text", cancelled: "Stopped", error: "Broken off" }[reason];
  const tokens = usage.completion_tokens;
  const count = `${formatCount(tokens)} ${tokens === 1 ? "token" : "tokens"}`;
  const parts = [how, count, seed === null ? "" : `seed ${seed}`];
  return parts.filter(Boolean).join(", ");
}
