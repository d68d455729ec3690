// What is known of a token, shown next to it: for the pointer, for the finger and for the keyboard.

import { formatCount } from "./format.js";
import { isReachable } from "./transcript.js";

const LINGER_MS = 180;
const GAP_PX = 4;

/**
 * Shows one piece of a pane at a time. `act` has what can be done there: `fork(pane, piece)`,
 * `rewind(pane, piece)` and `instead(pane, piece, tokenId)`; `announce(words)` speaks.
 */
export class TokenCard {
  pane = null;
  piece = null;
  #span = null;
  #timer = null;

  constructor(root, act, announce) {
    this.root = root;
    this.act = act;
    this.announce = announce;
    this.parts = Object.fromEntries(
      ["text", "place", "chance", "others", "fork", "rewind"].map((name) => [name, root.querySelector(`#card-${name}`)]),
    );
    this.parts.fork.addEventListener("click", () => this.fork());
    this.parts.rewind.addEventListener("click", () => this.rewind());
    root.addEventListener("pointerenter", () => clearTimeout(this.#timer));
    root.addEventListener("pointerleave", () => this.#hideSoon());
  }

  get isOpen() {
    return !this.root.hidden;
  }

  /** Watches the text of a pane. */
  watch(pane) {
    const { page, story } = pane.view;
    page.addEventListener("pointerover", ({ target, pointerType }) => {
      if (pointerType === "touch") return; // a tap asks for it
      if (story.pieceOf(target)) this.show(pane, target);
      else this.#hideSoon();
    });
    page.addEventListener("pointerleave", () => this.#hideSoon());
    page.addEventListener("click", (event) => this.#click(pane, event));
    page.addEventListener("scroll", () => this.pane === pane && this.#place(), { passive: true });
    page.addEventListener("keydown", (event) => this.#key(pane, event));
  }

  /** Shows the piece of a span, at once. */
  show(pane, span, speaks = false) {
    const piece = pane.view.story.pieceOf(span);
    clearTimeout(this.#timer);
    if (piece === this.piece || piece.kind === "break") return;
    this.#span?.classList.remove("pointed");
    [this.pane, this.piece, this.#span] = [pane, piece, span];
    span.classList.add("pointed");
    this.#fill();
    this.root.hidden = false;
    this.#place();
    if (speaks) this.announce(`${visible(piece.text)}, ${this.#words()}`);
  }

  hide() {
    clearTimeout(this.#timer);
    this.#span?.classList.remove("pointed");
    this.pane = this.piece = this.#span = null;
    this.root.hidden = true;
  }

  fork() {
    this.#do((pane, piece) => this.act.fork(pane, piece));
  }

  rewind() {
    this.#do((pane, piece) => this.act.rewind(pane, piece));
  }

  /** Goes on with another token in the place of this one. */
  instead(index) {
    const token = this.piece?.top[index];
    if (token) this.#do((pane, piece) => this.act.instead(pane, piece, token.token_id));
  }

  #do(action) {
    const { pane, piece } = this;
    if (!piece || !pane.canReach(piece)) return;
    this.hide();
    action(pane, piece);
  }

  #click(pane, event) {
    const piece = pane.view.story.pieceOf(event.target);
    if (!piece || piece.kind === "break" || !getSelection().isCollapsed) return;
    const isNew = piece !== this.piece;
    this.show(pane, event.target);
    if (event.pointerType === "touch" && isNew) return; // a first tap shows, the card acts
    if (event.pointerType === "touch") this.hide();
    else if (event.shiftKey) this.rewind();
    else this.fork();
  }

  #key(pane, event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.#step(pane, steps[event.key]);
    else if (this.pane !== pane) return;
    else if (event.key === "Enter" && event.target === pane.view.page) this.fork();
    else if (event.key === "r" || event.key === "R") this.rewind();
    else if (/^[1-5]$/.test(event.key)) this.instead(event.key - 1);
    else return;
    event.preventDefault();
  }

  #step(pane, step) {
    const { spans } = pane.view.story;
    const here = this.pane === pane ? spans.indexOf(this.#span) : spans.length;
    const next = Math.max(0, Math.min(spans.length - 1, here + step));
    if (!spans[next]) return;
    const { top, bottom } = spans[next].getBoundingClientRect();
    const page = pane.view.page.getBoundingClientRect();
    if (top < page.top + 40 || bottom > page.bottom - 40) spans[next].scrollIntoView({ block: "center" });
    this.show(pane, spans[next], true);
  }

  #words() {
    const { kind, logprob } = this.piece;
    if (kind === "prompt") return "your words";
    return logprob === null ? "probability unknown" : `${percent(logprob)} probable`;
  }

  #fill() {
    const { text, place, chance, others, fork, rewind } = this.parts;
    const { piece, pane } = this;
    text.textContent = visible(piece.text.length > 60 ? `${piece.text.slice(0, 60)}…` : piece.text);
    place.textContent = piece.end === null ? "" : `token ${formatCount(piece.end)}`;
    chance.textContent = this.#words();
    others.replaceChildren(...piece.top.map((token, i) => this.#other(token, i)));
    others.hidden = piece.top.length === 0;
    fork.disabled = !pane.canReach(piece);
    rewind.disabled = !pane.canReach(piece);
    fork.parentElement.hidden = !isReachable(piece);
  }

  #other({ token_id: id, logprob }, index) {
    const row = document.createElement("li");
    const button = document.createElement("button");
    const [name, share] = [document.createElement("span"), document.createElement("span")];
    const bar = document.createElement("meter");
    button.type = "button";
    button.title = "Fork before this token and go on with that one";
    name.textContent = `#${id}`;
    name.className = "other-text";
    share.textContent = percent(logprob);
    bar.max = 1;
    bar.value = Math.exp(logprob);
    bar.setAttribute("aria-hidden", "true");
    button.append(name, bar, share);
    button.addEventListener("click", () => this.instead(index));
    row.append(button);
    const { model, server } = this.pane;
    server.textOf(id, model?.id).then((text) => {
      if (text !== null) name.textContent = visible(text);
    });
    return row;
  }

  #hideSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.root.contains(document.activeElement) || this.hide(), LINGER_MS);
  }

  #place() {
    const rects = this.#span?.getClientRects() ?? [];
    if (rects.length === 0) return;
    const { left, top, bottom } = rects[rects.length - 1];
    const page = this.pane.view.page.getBoundingClientRect();
    if (bottom < page.top || top > page.bottom) {
      this.hide();
      return;
    }
    const { offsetWidth: width, offsetHeight: height } = this.root;
    const below = bottom + GAP_PX;
    const y = below + height < innerHeight - 8 ? below : Math.max(8, top - GAP_PX - height);
    this.root.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    this.root.style.top = `${y}px`;
  }
}

/** A log-probability as a share of a hundred. */
function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  if (share < 0.01) return "< 0.01\u00a0%";
  return `${share < 1 ? share.toFixed(2) : share < 10 ? share.toFixed(1) : Math.round(share)}\u00a0%`;
}

/** Text with its spaces and line ends to be seen. */
function visible(text) {
  if (text === "") return "(nothing)";
  return text.replaceAll("\n", "↵").replaceAll(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}
