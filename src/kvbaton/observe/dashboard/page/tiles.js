// The figures at the top, each with its last three minutes.

import { h, s, setAttr, setText } from "./dom.js";
import { bytesRate, count, ms, percent, rate } from "./format.js";

const HEIGHT = 28;
const WIDTH = 88;

const TILES = [
  { key: "handoffs", label: "Handoffs per second", line: "handoffs", value: (now) => rate(now.handoffs_s), sub: (now) => `${count(now.ended)} in the last minute` },
  { key: "delivered", label: "Delivered, last minute", line: "failed", value: (now) => percent(now.delivered), sub: (now) => (now.failed ? `${count(now.failed)} not delivered` : now.ended ? "every one" : "no handoffs"), bad: (now) => now.failed > 0 },
  { key: "ttft", label: "Time to first byte", line: "ttft_ms", value: (now) => ms(now.ttft_p50_ms), sub: (now) => `median; p99 ${ms(now.ttft_p99_ms)}` },
  { key: "flight", label: "Requests in flight", line: "in_flight", value: (now) => count(now.in_flight), sub: () => "at the router" },
  { key: "bytes", label: "KV throughput", line: "bytes", value: (now) => bytesRate(now.bytes_s), sub: () => "copied by all workers" },
];

export class Tiles {
  constructor(parent) {
    this.tiles = TILES.map((tile) => {
      const value = h("p", { class: "value" }, "–");
      const sub = h("p", { class: "sub" }, " ");
      const area = s("path", { class: "area" });
      const line = s("path", { class: "line", "vector-effect": "non-scaling-stroke" });
      const spark = s("svg", { class: "spark", preserveAspectRatio: "none", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" }, area, line);
      const root = h("article", { class: "card tile", "data-tile": tile.key }, h("h2", {}, tile.label), value, sub, spark);
      parent.append(root);
      return { tile, root, value, sub, area, line };
    });
  }

  update(state) {
    for (const { tile, root, value, sub, area, line } of this.tiles) {
      setText(value, tile.value(state.now));
      setText(sub, tile.sub(state.now));
      setAttr(root, "data-bad", Boolean(tile.bad?.(state.now)));
      const path = sparkline(state.history[tile.line] ?? []);
      setAttr(line, "d", path.line);
      setAttr(area, "d", path.area);
    }
  }
}

/** Two paths, a unit for each value: what is not known is a gap. */
export function sparkline(values) {
  const most = Math.max(...values.map((value) => value ?? 0), 1e-9);
  let line = "";
  let area = "";
  let from = null;
  const close = (to) => {
    if (from !== null) area += `L${to} ${HEIGHT}L${from} ${HEIGHT}Z`;
    from = null;
  };
  values.forEach((value, x) => {
    if (value === null) {
      close(x - 1);
      return;
    }
    const y = (HEIGHT - 1.5 - (value / most) * (HEIGHT - 4)).toFixed(1);
    const command = `${from === null ? "M" : "L"}${x} ${y}`;
    line += command;
    area += command;
    from ??= x;
  });
  close(values.length - 1);
  return { line, area };
}
