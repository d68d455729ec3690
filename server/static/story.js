// The text on the page. What arrives is collected and written once per frame.

const NEAR_END_PX = 48;

/**
 * Writes prompts and answers into `story`, which scrolls inside `page`.
 *
 * Every line is its own block, so a frame lays out the last line alone,
 * however long the text has grown. The text content stays exactly what came.
 */
export class Story {
  constructor(page, story, latestButton) {
    this.page = page;
    this.story = story;
    this.latestButton = latestButton;
    this.pending = "";
    this.line = null;
    this.following = true;
    page.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    latestButton.addEventListener("click", () => {
      this.follow();
      page.focus({ preventScroll: true });
    });
  }

  /** Removes everything. */
  clear() {
    this.pending = "";
    this.line = null;
    this.story.replaceChildren();
    this.follow();
  }

  /** Adds the reader's own words, set apart from the model's. */
  addPrompt(text) {
    this.flush();
    this.#write(text, "prompt");
    this.follow();
  }

  /** Marks that the text before has ended and another begins. */
  addBreak() {
    this.flush();
    const ornament = document.createElement("hr");
    this.story.append(ornament);
    this.line = null;
  }

  /** Queues generated text for the next frame. */
  append(text) {
    this.pending += text;
  }

  /** Writes what is queued; call once per frame. */
  flush() {
    if (!this.pending) return;
    this.#write(this.pending, "answer");
    this.pending = "";
    if (this.following) this.#scrollToEnd();
  }

  /** Shows or hides the caret. */
  setLive(live) {
    this.story.classList.toggle("live", live);
    this.story.setAttribute("aria-busy", String(live));
  }

  /** Goes to the end and stays there as text arrives. */
  follow() {
    this.following = true;
    this.latestButton.hidden = true;
    this.#scrollToEnd();
  }

  #write(text, kind) {
    for (const piece of text.split(/(?<=\n)/)) {
      if (!this.line) {
        this.line = document.createElement("div");
        this.line.className = "line";
        this.story.append(this.line);
      }
      this.#writeRun(piece, kind);
      if (piece.endsWith("\n")) this.line = null;
    }
  }

  #writeRun(text, kind) {
    const last = this.line.lastElementChild;
    if (last?.className === kind) {
      last.firstChild.appendData(text);
      return;
    }
    const run = document.createElement("span");
    run.className = kind;
    run.append(document.createTextNode(text));
    this.line.append(run);
  }

  #noticeScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.page;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.latestButton.hidden = this.following;
  }

  #scrollToEnd() {
    this.page.scrollTop = this.page.scrollHeight;
  }
}
