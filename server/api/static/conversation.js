// The conversation of the page at `/chat`, which the browser keeps: for the next visit, and for
// a server that has lost what it kept.

const NAME = "everstream.chat";

/**
 * `turns` are `{key, model, prompt, effort, seed}`, with `id` once the server has begun to answer,
 * and `answer`, `thought`, `end` and `usage` once it has ended.
 */
export class Conversation {
  turns = [];

  /** `changed` is called when another window has changed it. */
  constructor(changed) {
    this.#load();
    addEventListener("storage", ({ key }) => {
      if (key !== NAME && key !== null) return;
      this.#load();
      changed();
    });
  }

  /** The turn that has no end yet, or undefined. */
  get open() {
    const last = this.turns.at(-1);
    return last?.end ? undefined : last;
  }

  #load() {
    this.turns = JSON.parse(localStorage.getItem(NAME) ?? "[]");
  }

  /** Keeps it as it is now. Throws where the browser has no room. */
  save() {
    if (this.turns.length) localStorage.setItem(NAME, JSON.stringify(this.turns));
    else localStorage.removeItem(NAME);
  }

  /** The request for the answer of `turn`: the same whenever it is sent, so that it is done once. */
  bodyOf(turn) {
    const before = this.turns.slice(0, this.turns.indexOf(turn)).flatMap(itemsOf);
    return {
      model: turn.model,
      input: [...before, { role: "user", content: turn.prompt }],
      seed: turn.seed,
      background: true,
      idempotency_key: turn.key,
      ...(turn.effort && { reasoning: { effort: turn.effort } }),
    };
  }
}

/** What the model reads of a turn later: nothing of one that has no answer. */
function itemsOf({ prompt, answer, thought }) {
  if (!answer) return [];
  const thinking = { type: "reasoning", content: [{ type: "reasoning_text", text: thought }] };
  return [
    { role: "user", content: prompt },
    ...(thought ? [thinking] : []),
    { role: "assistant", content: answer },
  ];
}
