// The comparison the project is about: bytes this session holds, bytes a KV cache would.

import { Chart } from "./chart.js";
import { formatBytes, formatCount } from "./format.js";

/** Shows both sizes at a position of the session, as numbers, a sentence and a chart. */
export class Memory {
  constructor({ chart, stateBytes, cacheBytes, verdict, stateParts }) {
    this.chart = new Chart(chart);
    this.elements = { stateBytes, cacheBytes, verdict, stateParts };
    this.model = null;
    this.shown = null;
  }

  /** Takes the server's description of its model, as `/v1/models` gives it. */
  setModel({ everstream }) {
    if (everstream === this.model) return;
    this.model = everstream;
    this.elements.stateBytes.textContent = formatBytes(everstream.state_bytes_per_session);
    this.elements.stateParts.textContent = parts(everstream);
    this.shown = null;
  }

  /** Shows the state of things at `position`; nothing is touched if it has not moved. */
  show(position) {
    if (!this.model || position === this.shown) return;
    this.shown = position;
    const { state_bytes_per_session: state, kv_cache_bytes_per_token: perToken } = this.model;
    const cache = perToken * position;
    this.elements.cacheBytes.textContent = position ? formatBytes(cache) : "0";
    this.elements.verdict.textContent = verdict(state, perToken, position);
    this.chart.draw({ position, stateBytes: state, cacheBytesPerToken: perToken });
  }
}

/** What the state of a mechanism consists of: "elu: S 2 × 64 × 64, z 2 × 64 in each of 5 layers". */
function parts({ attention, state }) {
  const tensors = state.map(({ name, shape }) => `${name}\u00a0${shape.join("\u00a0×\u00a0")}`);
  const layers = state[0].layers === 1 ? "1 layer" : `each of ${state[0].layers} layers`;
  return `${attention}: ${tensors.join(", ")} in ${layers}`;
}

function verdict(state, perToken, position) {
  const crossing = Math.ceil(state / perToken);
  if (position <= crossing) {
    return `From token ${formatCount(crossing)} on, a KV cache needs more than this session ever will.`;
  }
  const ratio = (perToken * position) / state;
  const times = ratio < 10 ? ratio.toFixed(1) : formatCount(ratio);
  return `At token ${formatCount(position)} a KV cache would hold ${times}\u00a0times as much.`;
}
