// The prompt and its buttons, which act on the active session or on all of them.

import { readSampling, samplingOf } from "./sampling.js";

const NAMES = ["generate", "stop", "continue", "new"];

/** Reads what the reader wants and hands it to the panes. */
export class Composer {
  constructor(find, panes, server) {
    Object.assign(this, { find, panes, server });
    this.prompt = find("prompt");
    this.buttons = Object.fromEntries(NAMES.map((name) => [name, find(name)]));
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start(this.prompt.value);
    });
    this.buttons.stop.addEventListener("click", () => this.stop());
    this.buttons.continue.addEventListener("click", () => this.start(""));
    this.buttons.new.addEventListener("click", () => this.startFresh());
    find("endless").addEventListener("change", ({ target }) => {
      if (!target.checked) for (const pane of panes.list) pane.again = null;
    });
    this.prompt.addEventListener("input", () => this.draw());
    this.prompt.addEventListener("keydown", (event) => this.#enter(event));
  }

  /** The panes that are acted on. */
  get targets() {
    const { list, active } = this.panes;
    return this.find("everywhere").checked && list.length > 1 ? list : [active];
  }

  /** Generates after `text`; where it is empty, sessions that have a text go on. */
  start(text) {
    const form = this.find("controls");
    if (!form.checkValidity()) {
      this.find("sampling").open = true;
      form.reportValidity();
      return;
    }
    const fields = readSampling(form);
    const targets = this.targets.filter((pane) => !pane.run && (text || pane.session));
    targets.forEach((pane, i) => pane.generate(text, samplingOf(fields, i), this.find("endless").checked));
    this.prompt.value = "";
    this.draw();
  }

  /** Goes on in one pane, as `Continue` does. */
  continueIn(pane) {
    const form = this.find("controls");
    if (form.checkValidity()) pane.generate("", readSampling(form), this.find("endless").checked);
  }

  stop() {
    for (const pane of this.targets) pane.stop();
  }

  startFresh() {
    const { opening } = this.panes.active;
    for (const pane of this.targets) pane.reset();
    if (this.prompt.value === "") this.prompt.value = opening;
    this.prompt.focus();
    this.draw();
  }

  /** Shows what can be done now. */
  draw() {
    this.#takeBack();
    const { targets } = this;
    const { list, active } = this.panes;
    const running = targets.some((pane) => pane.run);
    const canStart = this.server.isOpen && targets.some((pane) => !pane.run);
    const empty = this.prompt.value === "";
    const hasSession = targets.some((pane) => pane.session);
    const enabled = {
      generate: canStart && !empty,
      stop: running,
      continue: canStart && targets.some((pane) => !pane.run && pane.session),
      new: targets.some((pane) => pane.session || pane.run || !pane.isEmpty),
    };
    this.#enable(enabled, running ? "stop" : empty && hasSession ? "continue" : "generate");
    this.prompt.placeholder = hasSession ? "Add words of your own, or continue" : "Write a beginning";
    this.find("everywhere-label").hidden = list.length < 2;
    const summary = this.find("summary");
    if (summary.textContent !== active.summary) summary.textContent = active.summary;
  }

  #enable(enabled, main) {
    const focused = document.activeElement;
    for (const [name, button] of Object.entries(this.buttons)) {
      button.disabled = !enabled[name];
      button.classList.toggle("primary", name === main);
    }
    const focusLost = focused?.disabled && Object.values(this.buttons).includes(focused);
    if (focusLost && enabled[main]) this.buttons[main].focus();
  }

  /** What the server has refused comes back to be changed. */
  #takeBack() {
    const { active } = this.panes;
    if (active.unsent && this.prompt.value === "") this.prompt.value = active.unsent;
    active.unsent = "";
  }

  #enter(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (this.server.isOpen && this.targets.some((pane) => !pane.run)) {
      if (this.prompt.value !== "" || this.targets.some((pane) => pane.session)) this.start(this.prompt.value);
    }
  }
}
