// The text on the page. What arrives is collected and written once per frame.

const NEAR_END_PX = 48;
const LONGEST_BLOCK_CHARS = 1500;
/** Log-probabilities below which a token counts as one step more surprising: 1/7, 1/40, 1/400. */
const SURPRISES = [-1.95, -3.7, -6];

/**
 * Writes the pieces of a transcript into `story`, which scrolls inside `page`: a span for each,
 * so that it can be pointed at, and a block for each line or so. A frame lays out the last block
 * alone, and blocks out of sight are not laid out at all, however long the text has grown. The
 * text content stays exactly what came.
 */
export class Story {
  constructor(page, story, latestButton) {
    this.page = page;
    this.story = story;
    this.latestButton = latestButton;
    this.following = true;
    this.spans = [];
    this.pieces = new WeakMap();
    this.pending = [];
    this.block = null;
    this.blockChars = 0;
    this.numCommon = 0;
    page.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    latestButton.addEventListener("click", () => {
      this.follow();
      page.focus({ preventScroll: true });
    });
  }

  /** Queues pieces for the next frame. */
  append(...pieces) {
    this.pending.push(...pieces);
  }

  /** Writes what is queued; call once per frame. */
  flush() {
    if (this.pending.length === 0) return;
    const fresh = document.createDocumentFragment();
    for (const piece of this.pending) this.#write(piece, fresh);
    this.pending.length = 0;
    this.story.append(fresh);
    if (this.following) this.#scrollToEnd();
  }

  /** Removes all but the first `count` pieces. */
  truncate(count) {
    this.flush();
    const [kept, gone] = [this.spans[count - 1], this.spans[count]];
    if (gone === undefined) return;
    const range = document.createRange();
    if (kept) range.setStartAfter(kept);
    else range.setStart(this.story, 0);
    range.setEnd(this.story, this.story.childNodes.length);
    range.deleteContents();
    this.spans.length = count;
    this.numCommon = Math.min(this.numCommon, count);
    this.block = kept?.parentElement === this.story ? null : (kept?.parentElement ?? null);
    this.blockChars = this.block?.textContent.length ?? 0;
    if (this.block?.textContent.endsWith("\n")) this.block = null;
    while (this.story.lastElementChild?.className === "line" && !this.story.lastElementChild.firstChild) {
      this.story.lastElementChild.remove();
    }
    if (count === 0) this.follow();
    else this.#noticeScroll(); // what is left may end in sight
  }

  /** Removes at least the first `count` pieces, in whole blocks; returns how many it removed. */
  dropFirst(count) {
    this.flush();
    let end = count;
    while (end < this.spans.length && this.spans[end].parentElement === this.spans[end - 1].parentElement) end += 1;
    if (end >= this.spans.length) return 0;
    const range = document.createRange();
    range.setStart(this.story, 0);
    range.setEndBefore(blockOf(this.spans[end], this.story));
    range.deleteContents();
    this.spans.splice(0, end);
    this.numCommon = Math.max(0, this.numCommon - end);
    return end;
  }

  /** Marks the place after the first `count` pieces as the one where a copy of session `from` left it. */
  markOrigin(count, from) {
    this.flush();
    const mark = document.createElement("span");
    mark.className = "mark";
    mark.dataset.label = from;
    mark.setAttribute("role", "note");
    mark.setAttribute("aria-label", `Left session ${from} here`);
    for (const span of this.spans.slice(0, count)) span.classList.add("shared");
    this.spans[count - 1]?.after(mark);
  }

  /** Marks a piece as one after which the session `name` has left. */
  markBranch(index, name) {
    this.flush();
    const span = this.spans[index];
    if (span) span.dataset.branches = (span.dataset.branches ?? "") + name;
  }

  /** Takes the marks of the session `name`, which was deleted, away. */
  unmarkBranch(name) {
    for (const span of this.story.querySelectorAll("[data-branches]")) {
      span.dataset.branches = span.dataset.branches.replace(name, "");
      if (span.dataset.branches === "") delete span.dataset.branches;
    }
  }

  /** Dims the first `count` pieces, which other sessions have as well. */
  setCommon(count) {
    this.flush();
    const [from, to] = [Math.min(count, this.numCommon), Math.max(count, this.numCommon)];
    for (const span of this.spans.slice(from, to)) span.classList.toggle("common", count > from);
    this.numCommon = count;
  }

  /** Shows a place in the text, in the middle. */
  reveal(index) {
    this.flush();
    this.spans[Math.min(index, this.spans.length - 1)]?.scrollIntoView({ block: "center" });
  }

  /** The piece that an element shows, or undefined. */
  pieceOf(element) {
    return this.pieces.get(element);
  }

  /** Shows or hides the caret. */
  setLive(live) {
    this.story.classList.toggle("live", live);
    const busy = String(live);
    if (this.story.getAttribute("aria-busy") !== busy) this.story.setAttribute("aria-busy", busy);
  }

  /** Goes to the end and stays there as text arrives. */
  follow() {
    this.following = true;
    this.latestButton.hidden = true;
    this.#scrollToEnd();
  }

  #write(piece, fresh) {
    const span = document.createElement(piece.kind === "break" ? "hr" : "span");
    this.spans.push(span);
    this.pieces.set(span, piece);
    if (piece.kind === "break") {
      fresh.append(span);
      this.block = null;
      return;
    }
    span.className = piece.kind === "prompt" ? "prompt" : "answer";
    span.append(piece.text); // as text, never as HTML
    const surprise = SURPRISES.filter((limit) => piece.logprob < limit).length;
    if (piece.logprob !== null && surprise) span.dataset.surprise = surprise;
    if (!this.block || this.blockChars > LONGEST_BLOCK_CHARS) {
      this.block = document.createElement("div");
      this.block.className = "line";
      this.blockChars = 0;
      fresh.append(this.block);
    }
    this.block.append(span);
    this.blockChars += piece.text.length;
    if (piece.text.endsWith("\n")) this.block = null;
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

/** The child of `story` in which a piece stands. */
function blockOf(span, story) {
  return span.parentElement === story ? span : span.parentElement;
}
