// One answer on the page: the thinking, the text as Markdown, and what there is to say of it.

import { formatCount } from "./format.js";
import { Markdown } from "./markdown.js";

const ENDS = { stopped: "Stopped.", length: "Cut off: the limit of tokens was reached.", failed: "The server failed here." };

/** Appends itself to `list`; `drawn` is called when it has changed its size. */
export class Answer {
  text = "";
  thought = "";
  #markdown;
  #frame = null;
  #drawnTo = 0;
  #thinking = null;

  constructor(list, drawn) {
    this.drawn = drawn;
    this.item = document.createElement("li");
    this.item.className = "assistant";
    this.item.setAttribute("aria-busy", "true");
    list.append(this.item);
    this.restart();
  }

  /** Begins again, without a word. */
  restart() {
    this.text = this.thought = "";
    this.#drawnTo = 0;
    this.#thinking = null;
    const words = document.createElement("div");
    words.className = "words";
    this.#markdown = new Markdown(words);
    this.item.replaceChildren(words);
  }

  /** More of the text, which is drawn with the next frame. */
  write(text) {
    this.text += text;
    this.#frame ??= requestAnimationFrame(() => this.#draw());
  }

  /** More of what the model thinks, which is folded away. */
  think(text) {
    this.thought += text;
    this.#thinking ??= this.#foldedAway();
    this.#thinking.append(text);
  }

  /** Shows a turn that has ended. */
  end({ end, usage, answer, thought }) {
    if (answer !== this.text || thought !== this.thought) {
      this.restart();
      if (thought) this.think(thought);
      this.text = answer;
    }
    cancelAnimationFrame(this.#frame);
    this.#draw();
    this.item.removeAttribute("aria-busy");
    const about = document.createElement("p");
    about.className = "about";
    const copy = document.createElement("button");
    copy.type = "button";
    copy.className = "link copy-answer";
    copy.append("Copy");
    about.append(copy, [ENDS[end], usage && figures(usage)].filter(Boolean).join(" "));
    this.item.append(about);
    this.drawn();
  }

  #draw() {
    this.#frame = null;
    this.#markdown.write(this.text.slice(this.#drawnTo));
    this.#drawnTo = this.text.length;
    this.drawn();
  }

  #foldedAway() {
    const details = document.createElement("details");
    details.className = "thinking";
    const summary = document.createElement("summary");
    summary.append("Thinking");
    const words = document.createElement("div");
    words.className = "thoughts";
    details.append(summary, words);
    this.item.prepend(details);
    return words;
  }
}

function figures({ written, read, cached }) {
  return `${formatCount(written)} tokens, ${formatCount(read)} read, ${formatCount(cached)} of them cached`;
}
