// What several sessions have in common: dimmed, so that what differs stands out.

import { formatCount } from "./format.js";
import { numCommon } from "./transcript.js";

/** Compares all panes with the active one, once it is switched on. */
export class Comparison {
  isOn = false;

  constructor(panes, output) {
    this.panes = panes;
    this.output = output;
  }

  /** Switches it, and goes to where the texts part. */
  toggle() {
    this.isOn = !this.isOn;
    this.draw();
    if (!this.isOn) return;
    for (const pane of this.panes.list) pane.view.story.reveal(pane.view.story.numCommon);
  }

  /** Marks what the panes share; call after changes. */
  draw() {
    const { list, active } = this.panes;
    const isOn = this.isOn && list.length > 1;
    document.documentElement.classList.toggle("comparing", isOn);
    const others = list.filter((pane) => pane !== active);
    const shared = others.map((pane) => (isOn ? numCommon(active.transcript, pane.transcript) : [0, 0]));
    others.forEach((pane, i) => pane.view.story.setCommon(shared[i][1]));
    active.view.story.setCommon(Math.max(0, ...shared.map(([here]) => here)));
    const words = isOn ? sentence(active, others, shared) : "";
    if (this.output.textContent !== words) this.output.textContent = words;
  }
}

function sentence(active, others, shared) {
  const parts = others.map((pane, i) => {
    const last = active.transcript.pieces[shared[i][0] - 1];
    if (!last) return `${pane.name} nothing`;
    return `${pane.name} the first ${formatCount(last.end ?? last.start)} tokens`;
  });
  return `${active.name} shares with ${parts.join(", with ")}.`;
}
