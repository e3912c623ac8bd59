// How long handoffs spend in each stage at D: the median as a full bar, the 95th percentile as a line behind it.

import { h, setAttr, setText } from "./dom.js";
import { count, ms, words } from "./format.js";

const MEANING = {
  claim: "asked to granted by P",
  queue: "until the engine found blocks",
  first_byte: "from the blocks to the end of the first copy; part of copy",
  copy: "from the blocks to the last byte",
  commit: "from the last byte until P confirmed the copy",
  deliver: "until the engine took it",
};

export class Stages {
  constructor(parent, note) {
    this.note = note;
    this.rows = new Map();
    for (const [name, meaning] of Object.entries(MEANING)) {
      const half = h("span", { class: "half" });
      const most = h("span", { class: "most" });
      const value = h("span", { class: "times" }, "–");
      const root = h("div", { class: "stage-row", "data-stage": name, title: meaning },
        h("span", { class: "name" }, words(name)), h("span", { class: "track", "aria-hidden": "true" }, most, half), value);
      parent.append(root);
      this.rows.set(name, { root, half, most, value });
    }
  }

  update(state) {
    const longest = Math.max(...state.stages.map((stage) => stage.p95_ms ?? 0), 0.001);
    const part = (value) => (value === null ? "0%" : `max(2px, ${((100 * value) / longest).toFixed(1)}%)`);
    let seen = 0;
    for (const stage of state.stages) {
      const row = this.rows.get(stage.name);
      if (row === undefined) continue;
      seen = Math.max(seen, stage.count);
      row.half.style.width = part(stage.p50_ms);
      row.most.style.width = part(stage.p95_ms);
      setText(row.value, stage.p50_ms === null ? "–" : `${ms(stage.p50_ms)} · p95 ${ms(stage.p95_ms)}`);
      setAttr(row.root, "data-count", stage.count);
    }
    setText(this.note, seen ? `median and p95 of ${count(seen)} in the last minute` : "none in the last minute");
  }
}
