// Milliseconds per token along the text, which stay the same however long it gets.

import { formatMillis } from "./format.js";

const MAX_POINTS = 160;
const SHORTEST_MS = 80;
const SMALLEST_DOMAIN_TOKENS = 256;
const AHEAD = 1.3;

/**
 * The mean time per token of runs of tokens. Browsers hand on what arrives in bursts, so that the
 * time of a single token says little: a run has several, and takes several frames. Where there
 * are many runs, pairs of them become one.
 */
export class SpeedSeries {
  tokensPerPoint = 8;
  points = []; // {position, tokens, ms}
  #from = null; // {at, position} of the first token of the run

  /** A token arrived. */
  add(position, now) {
    this.#from ??= { at: now, position };
    const tokens = position - this.#from.position;
    const elapsed = now - this.#from.at;
    if (tokens < this.tokensPerPoint || elapsed < SHORTEST_MS) return;
    this.points.push({ position, tokens, ms: elapsed / tokens });
    this.#from = { at: now, position };
    if (this.points.length > MAX_POINTS) this.#halve();
  }

  /** What comes next does not follow at once upon what came before. */
  pause() {
    this.#from = null;
  }

  /** Forgets what lies after position `at`. */
  truncate(at) {
    this.points = this.points.filter((point) => point.position <= at);
    this.pause();
  }

  copy(at) {
    const copy = new SpeedSeries();
    copy.tokensPerPoint = this.tokensPerPoint;
    copy.points = this.points.filter((point) => point.position <= at);
    return copy;
  }

  /** The time per token lately, or null. */
  get latestMs() {
    const last = this.points.slice(-4);
    if (last.length === 0) return null;
    return mean(last).ms;
  }

  /** What the axis reaches to: twice what is usual. A pause of the machine is cut off there. */
  get scaleMs() {
    const sorted = this.points.map((point) => point.ms).sort((a, b) => a - b);
    const middle = sorted[Math.floor(sorted.length / 2)] ?? 1;
    return niceAbove(Math.max(1, middle * 2));
  }

  #halve() {
    const { points } = this;
    this.points = [];
    for (let i = 1; i < points.length; i += 2) {
      this.points.push({ position: points[i].position, ...mean(points.slice(i - 1, i + 1)) });
    }
    this.tokensPerPoint *= 2;
  }
}

/** Draws a series into `svg`, along the same axis as the chart of memory above it. */
export class SpeedChart {
  constructor(svg, output) {
    this.svg = svg;
    this.output = output;
    this.line = svg.querySelector(".speed-line");
    this.floor = svg.querySelector(".floor");
    this.top = svg.querySelector(".speed-top");
    this.data = null;
    this.width = 0;
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.height = entry.contentRect.height;
      svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      if (this.data) this.draw(...this.data);
    }).observe(svg);
  }

  draw(series, position) {
    this.data = [series, position];
    const ms = series.latestMs;
    this.output.value = ms === null ? "–" : formatMillis(ms);
    if (!this.width) return;
    const maxTokens = Math.max(SMALLEST_DOMAIN_TOKENS, position * AHEAD);
    const maxMs = series.scaleMs;
    const x = (tokens) => 5 + (tokens / maxTokens) * (this.width - 10);
    const y = (value) => this.height - 2 - Math.min(1, value / maxMs) * (this.height - 16);
    const at = series.points.map((point) => `${x(point.position).toFixed(1)} ${y(point.ms).toFixed(1)}`);
    this.line.setAttribute("d", at.length > 1 ? `M${at.join("L")}` : "");
    for (const [name, value] of [["x1", 0], ["x2", this.width], ["y1", y(0)], ["y2", y(0)]]) {
      this.floor.setAttribute(name, value);
    }
    this.top.setAttribute("y", 10);
    this.top.textContent = at.length > 1 ? formatMillis(maxMs) : "";
  }
}

/** Several runs as one. */
function mean(points) {
  const tokens = points.reduce((sum, point) => sum + point.tokens, 0);
  const elapsed = points.reduce((sum, point) => sum + point.ms * point.tokens, 0);
  return { tokens, ms: elapsed / tokens };
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value);
}
