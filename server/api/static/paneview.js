// How a pane looks: its head, its text, and what is said below the text.

import { formatCount, formatRate } from "./format.js";
import { Story } from "./story.js";

/** How long it is said that a stream was taken up again. */
const TAKEN_UP_MS = 8000;

/** The elements of one pane, made from the page's template. */
export class PaneView {
  constructor(template, name) {
    this.name = name;
    this.element = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => this.element.querySelector(selector);
    this.page = find(".page");
    this.badge = find(".badge");
    this.closeButton = find(".close");
    this.intro = find(".intro");
    this.figures = find(".figures");
    this.origin = find(".origin");
    this.notice = find(".notice");
    this.takenUp = find(".taken-up");
    this.story = new Story(this.page, find(".story"), find(".latest"));
    this.element.setAttribute("aria-label", `Session ${name}`);
    this.page.setAttribute("aria-label", `The text so far in session ${name}`);
    this.badge.textContent = name;
    this.badge.setAttribute("aria-label", `Go to session ${name}`);
    this.closeButton.setAttribute("aria-label", `Close session ${name}`);
  }

  /** Shows where a copy has left the session that it is of. */
  showOrigin(name, at, pieces) {
    this.origin.textContent = `from ${name} at ${formatCount(at)}`;
    this.story.append(...pieces);
    this.story.markOrigin(pieces.length, name);
    this.story.follow();
  }

  /** Draws what has changed since the last frame. */
  draw(pane, now, isActive) {
    this.story.flush();
    const { position } = pane.transcript;
    const isRunning = pane.run !== null;
    this.story.setLive(isRunning);
    this.intro.hidden = !pane.isEmpty || isRunning;
    const rate = isRunning ? pane.meter.currentRate(now) : null;
    const words = `${formatCount(position)} ${position === 1 ? "token" : "tokens"}`;
    setText(this.figures, rate ? `${words} · ${formatRate(rate)}/s` : words);
    this.element.classList.toggle("active", isActive);
    this.element.classList.toggle("running", isRunning);
    const current = String(isActive);
    if (this.badge.getAttribute("aria-current") !== current) this.badge.setAttribute("aria-current", current);
  }

  showNotice(words) {
    this.notice.textContent = words;
    this.notice.hidden = false;
  }

  /** Says for some seconds that a stream went on after the connection was lost. */
  showTakenUp(position) {
    this.takenUp.textContent = `The connection was lost and is back. The text continues at token ${formatCount(position)}; nothing is missing.`;
    this.takenUp.hidden = false;
    clearTimeout(this.takenUpTimer);
    this.takenUpTimer = setTimeout(() => (this.takenUp.hidden = true), TAKEN_UP_MS);
  }

  hideNotes() {
    this.notice.hidden = true;
    this.takenUp.hidden = true;
  }

  clear() {
    this.hideNotes();
    this.origin.textContent = "";
    this.story.truncate(0);
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
