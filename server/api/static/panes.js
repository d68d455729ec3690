// The sessions that stand side by side, one of which the reader acts on.

import { Pane } from "./pane.js";
import { PaneView } from "./paneview.js";
import { readPast } from "./past.js";

const MAX_PANES = 8;
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const NARROW = matchMedia("(max-width: 60rem)");

/** Keeps the panes in `row`, and a tab for each in `tabs`, which narrow screens show. */
export class Panes {
  list = [];
  active = null;
  model = null; // of new sessions

  constructor({ row, tabs, template, server, onAdd, onChange }) {
    Object.assign(this, { row, tabs, template, server, onAdd, onChange });
    row.addEventListener("scroll", () => this.#noticeSwipe(), { passive: true });
  }

  get isFull() {
    return this.list.length >= MAX_PANES;
  }

  /** A new pane, after `neighbour` or at the end, which becomes the active one. */
  add(neighbour = this.list.at(-1)) {
    if (this.isFull) return null;
    const names = new Set(this.list.map((pane) => pane.name));
    const name = [...LETTERS].find((letter) => !names.has(letter));
    const view = new PaneView(this.template, name);
    const { server, model, onChange } = this;
    const pane = new Pane({ name, server, model, view, onChange });
    this.list.splice(this.list.indexOf(neighbour) + 1, 0, pane);
    if (neighbour) neighbour.view.element.after(view.element);
    else this.row.append(view.element);
    view.element.addEventListener("pointerdown", () => this.activate(pane, false));
    view.element.addEventListener("focusin", () => this.activate(pane, false));
    view.badge.addEventListener("click", () => this.activate(pane));
    view.closeButton.addEventListener("click", () => this.remove(pane));
    this.onAdd(pane);
    this.#changed();
    this.activate(pane);
    return pane;
  }

  /** Opens a copy of `pane` as it was at position `at`, right next to it. */
  async fork(pane, at) {
    let session;
    try {
      if (this.isFull) throw new Error(`There is room for ${MAX_PANES} sessions. Close one of them first.`);
      session = await pane.fork(at);
    } catch (error) {
      pane.explain(error, at);
      return null;
    }
    const copy = this.add(pane);
    copy.adopt(session, pane, at);
    pane.view.story.markBranch(copy.transcript.pieces.length - 1, copy.name);
    return copy;
  }

  /** Shows the sessions that an address names, as `sessionsIn` gives them. */
  async restore(sessions) {
    const shown = (id) => this.list.find((pane) => pane.session?.id === id)?.transcript;
    for (const session of sessions.slice(0, MAX_PANES)) {
      const past = await readPast(this.server, session.lineage, shown);
      const origin = this.list.find((pane) => pane.session?.id === session.lineage[0]?.id);
      const pane = this.active?.isUnused ? this.active : this.add();
      await pane.restore(session, past, origin?.name ?? "a session");
    }
  }

  /** Takes a pane out and frees its session; the last one is only cleared. */
  remove(pane) {
    pane.reset();
    if (this.list.length === 1) return;
    const index = this.list.indexOf(pane);
    this.list.splice(index, 1);
    pane.view.element.remove();
    for (const other of this.list) other.view.story.unmarkBranch(pane.name);
    this.#changed();
    if (pane === this.active) this.activate(this.list[Math.min(index, this.list.length - 1)]);
    this.onChange(this.active);
  }

  /** Makes a pane the one that is acted on, and shows it, where it may be out of sight.
   *
   * The only pane is in sight, and is not scrolled to: in newer Chromium the first Tab would lead on
   * from there, past the link that skips to the prompt. */
  activate(pane, shows = true) {
    if (shows && this.list.length > 1) {
      pane.view.element.scrollIntoView({ inline: "nearest", block: "nearest" });
    }
    if (pane === this.active) return;
    this.active = pane;
    this.#showActive();
    this.onChange(pane);
  }

  #changed() {
    this.row.dataset.count = this.list.length;
    const tabs = this.list.map((pane) => {
      const tab = document.createElement("button");
      tab.type = "button";
      tab.textContent = pane.name;
      tab.setAttribute("aria-label", `Session ${pane.name}`);
      tab.addEventListener("click", () => this.activate(pane));
      return tab;
    });
    this.tabs.replaceChildren(...tabs);
    this.tabs.hidden = tabs.length < 2;
    this.#showActive();
  }

  #showActive() {
    const index = this.list.indexOf(this.active);
    [...this.tabs.children].forEach((tab, i) => tab.setAttribute("aria-current", String(i === index)));
  }

  // On a narrow screen one pane fills the row: the one that was swiped to is meant.
  #noticeSwipe() {
    if (!NARROW.matches) return;
    const index = Math.round(this.row.scrollLeft / this.row.clientWidth);
    if (this.list[index]) this.activate(this.list[index], false);
  }
}
