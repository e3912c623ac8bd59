// One row for each worker: its state, what it keeps for others against what it has, and how old the oldest of that is.

import { Keyed, h, setAttr, setText } from "./dom.js";
import { bytesRate, count, rate, seconds } from "./format.js";

const SIGNS = { ready: "●", draining: "◑", suspect: "▲", broken: "✕", gone: "○", silent: "…" };

/** A worker's state in a word, with what a reader should know beside it. */
export function stateOf(worker) {
  if (worker.silent && worker.state !== "gone") return { key: "silent", sign: SIGNS.silent, text: `silent for ${seconds(worker.heard_s)}` };
  return { key: worker.state, sign: SIGNS[worker.state] ?? "?", text: worker.state };
}

const meter = () => {
  const bar = h("span", { class: "fill" });
  const text = h("span", { class: "of" }, "–");
  return { root: h("span", { class: "meter" }, h("span", { class: "track", "aria-hidden": "true" }, bar), text), bar, text };
};

function setMeter(part, value, most, text) {
  const share = value > 0 && most > 0 ? Math.min(value / most, 1) : 0;
  part.bar.style.width = `${(100 * share).toFixed(1)}%`;
  setAttr(part.root, "data-level", share >= 0.9 ? "high" : share >= 0.7 ? "raised" : null);
  setText(part.text, text);
}

export class Workers {
  constructor(table, none, note) {
    this.table = table;
    this.none = none;
    this.note = note;
    this.rows = new Keyed(table.tBodies[0], () => this.make());
  }

  make() {
    const cells = {};
    for (const name of ["worker", "role", "state", "pins", "leases", "age", "running", "handoffs", "bytes"]) {
      const number = ["leases", "running", "handoffs", "bytes"].includes(name);
      cells[name] = name === "worker" ? h("th", { scope: "row" }) : h("td", { class: number ? "number" : null });
    }
    const sign = h("span", { class: "sign", "aria-hidden": "true" });
    const word = h("span", {});
    const state = h("span", { class: "state" }, sign, word);
    cells.state.append(state);
    const pins = meter();
    const age = meter();
    cells.pins.append(pins.root);
    cells.age.append(age.root);
    return { root: h("tr", {}, ...Object.values(cells)), cells, state, sign, word, pins, age };
  }

  update(state) {
    this.rows.update(state.workers, (worker) => `${worker.name} ${worker.incarnation}`, (row, worker) => {
      const { cells } = row;
      const standing = stateOf(worker);
      setText(cells.worker, worker.name);
      setText(cells.role, worker.role);
      setAttr(row.root, "data-worker", worker.name);
      setAttr(row.root, "data-state", standing.key);
      setAttr(row.root, "title", worker.note ?? null);
      setAttr(row.state, "data-state", standing.key);
      setText(row.sign, standing.sign);
      setText(row.word, standing.text);
      const told = worker.pins !== undefined;
      setMeter(row.pins, worker.pins ?? 0, worker.blocks ?? 0, told ? `${count(worker.pins)} of ${count(worker.blocks)}` : "–");
      const oldest = worker.oldest_lease_s;
      const bound = worker.lease_max_s;
      const age = oldest === undefined ? "–" : worker.leases ? `${seconds(oldest)}${bound ? ` of ${seconds(bound)}` : ""}` : "none";
      setMeter(row.age, worker.leases ? (oldest ?? 0) : 0, bound ?? 0, age);
      setText(cells.leases, count(worker.leases));
      setText(cells.running, count(worker.running));
      setText(cells.handoffs, worker.handoffs_s ? rate(worker.handoffs_s) : "–");
      setText(cells.bytes, worker.bytes_s ? bytesRate(worker.bytes_s) : "–");
    });
    this.table.hidden = state.workers.length === 0;
    this.none.hidden = state.workers.length > 0;
    const more = state.workers_all - state.workers.length;
    const states = Object.entries(state.states).map(([name, number]) => `${number} ${name}`).join(", ");
    setText(this.note, more > 0 ? `${states}; ${count(more)} not shown` : states);
  }
}
