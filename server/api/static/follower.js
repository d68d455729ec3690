// Keeps the end of a scrolling box in view while it grows, unless its reader has scrolled up.

/** So near is at the end, in CSS pixels. */
const NEAR_PX = 40;

/** Follows the end of `box`; `button` leads back to it where it is not followed. */
export class Follower {
  #follows = true;
  #top = 0;

  constructor(box, button) {
    Object.assign(this, { box, button });
    box.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    button.addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.grown()).observe(box);
  }

  /** Goes to the end and stays there. */
  follow() {
    this.#follows = true;
    this.grown();
  }

  /** The box has more in it. */
  grown() {
    const { box } = this;
    if (this.#follows) box.scrollTop = box.scrollHeight;
    this.#top = box.scrollTop;
    this.button.hidden = this.#follows || this.#isAtEnd;
  }

  get #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  #scrolled() {
    const { scrollTop } = this.box;
    // The box may have grown since a scroll of our own, which never goes up.
    if (this.#isAtEnd) this.#follows = true;
    else if (scrollTop < this.#top) this.#follows = false;
    this.#top = scrollTop;
    this.button.hidden = this.#follows || this.#isAtEnd;
  }
}
