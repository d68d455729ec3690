// The chart: bytes over position, one line that is flat and one that is not.

import { byteUnit, countUpTo } from "./format.js";

const SMALLEST_DOMAIN_TOKENS = 256;
const AHEAD = 1.3;
const TOP_PX = 14;
const BOTTOM_PX = 22;
const DOT_PX = 5;

/** Steps of 1, 2 or 5 (times a power of ten) units that give at most `most` ticks below `limit`. */
function ticks(limit, most, unit = 1) {
  const rough = limit / most / unit;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) * unit;
  const values = [];
  for (let value = step; value <= limit; value += step) values.push(value);
  return values;
}

/** Draws into the `svg` of the page; its elements are there already, only attributes change. */
export class Chart {
  constructor(svg) {
    this.svg = svg;
    this.width = 0;
    this.height = 0;
    this.data = null;
    this.gridLines = [...svg.querySelectorAll(".grid line")];
    this.yLabels = [...svg.querySelectorAll(".ticks-y text")];
    this.xLabels = [...svg.querySelectorAll(".ticks-x text")];
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.height = entry.contentRect.height;
      svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      if (this.data) this.draw(this.data);
    }).observe(svg);
  }

  /** `position` in tokens; both sizes in bytes, the cache's per token. */
  draw(data) {
    this.data = data;
    if (!this.width) return;
    this.svg.dataset.drawn = "";
    const { position, stateBytes, cacheBytesPerToken } = data;
    const maxTokens = Math.max(SMALLEST_DOMAIN_TOKENS, position * AHEAD);
    const maxBytes = Math.max(cacheBytesPerToken * maxTokens, stateBytes * 1.6);
    const base = this.height - BOTTOM_PX;
    const x = (tokens) => DOT_PX + (tokens / maxTokens) * (this.width - 2 * DOT_PX);
    const y = (bytes) => base - (bytes / maxBytes) * (base - TOP_PX);

    const now = [x(position), y(position * cacheBytesPerToken)];
    const end = [x(maxTokens), y(maxTokens * cacheBytesPerToken)];
    const flat = y(stateBytes);
    this.#path(".cache-area", `M${x(0)} ${base}L${now}L${now[0]} ${base}Z`);
    this.#path(".cache-line", `M${x(0)} ${base}L${now}`);
    this.#path(".cache-ahead", `M${now}L${end}`);
    this.#path(".state-line", `M${x(0)} ${flat}H${now[0]}`);
    this.#path(".state-ahead", `M${now[0]} ${flat}H${end[0]}`);
    this.#dot(".cache-dot", ...now);
    this.#dot(".state-dot", now[0], flat);
    this.#yAxis(maxBytes, y);
    this.#xAxis(maxTokens, x);
  }

  #path(selector, d) {
    this.svg.querySelector(selector).setAttribute("d", d);
  }

  #dot(selector, cx, cy) {
    const dot = this.svg.querySelector(selector);
    dot.setAttribute("cx", cx);
    dot.setAttribute("cy", cy);
  }

  #yAxis(maxBytes, y) {
    const { size, format } = byteUnit(maxBytes);
    const values = ticks(maxBytes, this.gridLines.length - 1, size);
    this.gridLines.forEach((line, i) => {
      const at = y(values[i] ?? 0);
      line.setAttribute("x1", 0);
      line.setAttribute("x2", this.width);
      line.setAttribute("y1", at);
      line.setAttribute("y2", at);
      this.yLabels[i].setAttribute("y", at - 4);
      this.yLabels[i].textContent = i < values.length ? format(values[i]) : "";
    });
  }

  #xAxis(maxTokens, x) {
    const values = ticks(maxTokens, this.xLabels.length - 1);
    const format = countUpTo(maxTokens);
    this.xLabels.forEach((label, i) => {
      const value = values[i];
      const room = value !== undefined && x(value) < this.width - 18;
      label.textContent = room ? format(value) + (i === 0 ? "\u00a0tokens" : "") : "";
      label.setAttribute("x", room ? x(value) : 0);
      label.setAttribute("y", this.height - 4);
    });
  }
}
