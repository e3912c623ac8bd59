// The figures at the top, each with its last three minutes on an axis from 0 to the most of them.

import { h, s, setAttr, setText } from "./dom.js";
import { bytesRate, count, ms, percent, rate } from "./format.js";

const HEIGHT = 28;
const WIDTH = 88;

const several = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

const answers = (per_s) => Object.entries(per_s).filter(([name, value]) => name !== "gone" || value).map(([name, value]) => `${name} ${rate(value)}`).join(" · ");

/** `most` fixes the axis; otherwise it ends at the highest value. */
const TILES = [
  { key: "requests", label: "Requests per second", line: "requests", axis: rate, value: (now) => rate(Object.values(now.answers_s).reduce((sum, each) => sum + each, 0)), sub: (now) => answers(now.answers_s), title: "Requests that ended, by the status of their answer. Gone: the client left first." },
  { key: "errors", label: "5xx, last minute", line: "errors", axis: rate, value: (now) => count(now.errors), sub: (now) => (now.errors ? `${rate(now.answers_s["5xx"])} per second` : "none"), bad: (now) => now.errors > 0, title: "Requests that were answered with a status of 500 or more." },
  { key: "handoffs", label: "Handoffs per second", line: "handoffs", axis: rate, value: (now) => rate(now.handoffs_s), sub: (now) => `${count(now.ended)} in the last minute` },
  { key: "delivered", label: "Delivered, last minute", line: "delivered", axis: percent, most: 1, value: (now) => percent(now.delivered), sub: (now) => (now.failed ? `${count(now.failed)} not delivered` : now.ended ? "every one" : "no handoffs"), bad: (now) => now.failed > 0 },
  { key: "ttft", label: "Time to first byte", line: "ttft_ms", axis: ms, value: (now) => ms(now.ttft_p50_ms), sub: (now) => `median; p99 ${ms(now.ttft_p99_ms)}` },
  { key: "tokens", label: "Tokens per second", line: "tokens", axis: rate, value: (now) => rate(now.tokens_s), sub: (now) => `ITL ${ms(now.itl_p50_ms)}; p99 ${ms(now.itl_p99_ms)}`, title: "Chunks of streamed answers that bear a token. ITL: mean time between them in one answer; median and p99 of the answers of the last minute." },
  { key: "flight", label: "Requests in flight", line: "in_flight", axis: count, value: (now) => count(now.in_flight), sub: (now) => `${count(now.waiting)} waiting for a first byte` },
  { key: "bytes", label: "KV throughput", line: "bytes", axis: bytesRate, value: (now) => bytesRate(now.bytes_s), sub: () => "copied by all workers" },
  { key: "retries", label: "Retries, last minute", line: "retries", axis: count, value: (now) => count(now.retries), sub: (now) => several(now.mistakes, "client error", "client errors"), title: "Client errors: requests that were refused with a status of 400 to 499. They are no failed handoffs." },
  { key: "alone", label: "Prompts computed by D alone", value: (now) => percent(now.alone), sub: (now) => (now.alone_told ? "of prompt tokens, last minute" : "not told by these workers"), title: "Prompt tokens that decode workers computed although a prefill worker should have, of all." },
];

export class Tiles {
  constructor(parent) {
    this.tiles = TILES.map((tile) => {
      const value = h("p", { class: "value" }, "–");
      const sub = h("p", { class: "sub" }, " ");
      const root = h("article", { class: "card tile", "data-tile": tile.key, title: tile.title }, h("h2", {}, tile.label), value, sub);
      const chart = tile.line ? this.chart(tile) : null;
      if (chart) root.append(chart.root);
      parent.append(root);
      return { tile, root, value, sub, chart };
    });
  }

  /** A line with its axes: 0 and the most at its right, three minutes ago and now below. */
  chart(tile) {
    const area = s("path", { class: "area" });
    const line = s("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    const short = s("path", { class: "short", "vector-effect": "non-scaling-stroke" });
    const spark = s("svg", { class: "spark", preserveAspectRatio: "none", viewBox: `0 0 ${WIDTH} ${HEIGHT}` }, area, line, short);
    const most = h("span", { class: "most" });
    const root = h("div", { class: "chart", "data-line": tile.line, "aria-hidden": "true" }, spark,
      h("span", { class: "scale" }, most, h("span", {}, "0")), h("span", { class: "times" }, h("span", {}, "−3 min"), h("span", {}, "now")));
    return { root, area, line, short, most };
  }

  update(state) {
    for (const { tile, root, value, sub, chart } of this.tiles) {
      setText(value, tile.value(state.now));
      setText(sub, tile.sub(state.now));
      setAttr(root, "data-bad", Boolean(tile.bad?.(state.now)));
      if (!chart) continue;
      const values = state.history[tile.line] ?? [];
      const most = tile.most ?? Math.max(...values.map((each) => each ?? 0), 0);
      const path = sparkline(values, most);
      setAttr(chart.line, "d", path.line);
      setAttr(chart.area, "d", path.area);
      setAttr(chart.short, "d", tile.most ? path.short : "");
      setText(chart.most, most > 0 ? tile.axis(most) : "");
    }
  }
}

/** Paths, a unit for each value: what is not known is a gap, a value between gaps a dash. `short`: where it is below the most. */
export function sparkline(values, most) {
  let line = "";
  let area = "";
  let short = "";
  let from = null;
  const close = (to) => {
    if (from !== null) area += `L${to} ${HEIGHT}L${from} ${HEIGHT}Z`;
    from = null;
  };
  values.forEach((value, x) => {
    if (value === null) {
      close(x - 0.5);
      return;
    }
    const y = (HEIGHT - 1.5 - (value / Math.max(most, 1e-9)) * (HEIGHT - 4)).toFixed(1);
    const path = `${from === null ? `M${Math.max(x - 0.5, 0)} ${y}` : ""}L${x} ${y}${(values[x + 1] ?? null) === null ? `L${x + 0.5} ${y}` : ""}`;
    line += path;
    area += path;
    if (value < most) short += `M${x} 2.5V${HEIGHT}`;
    from ??= Math.max(x - 0.5, 0);
  });
  close(values.length - 0.5);
  return { line, area, short };
}
