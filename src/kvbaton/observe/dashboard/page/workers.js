// One row for each worker: its state and queue, what it keeps for others against what it has, and how to drain it.

import { Keyed, copyButton, h, setAttr, setText } from "./dom.js";
import { bytesRate, count, percent, rate, seconds } from "./format.js";

const SIGNS = { ready: "●", draining: "◑", suspect: "▲", broken: "✕", gone: "○", silent: "…", no_http: "◌" };

/** A worker's state in a word, with what a reader should know beside it. */
export function stateOf(worker) {
  if (worker.silent && worker.state !== "gone") return { key: "silent", sign: SIGNS.silent, text: `silent for ${seconds(worker.heard_s)}` };
  return { key: worker.state, sign: SIGNS[worker.state] ?? "?", text: worker.state === "no_http" ? "no HTTP: inside another server" : worker.state };
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

/** The share of its KV cache that is in use; null where it does not tell. */
export function usedShare(worker) {
  if (!worker.blocks || worker.free_blocks === undefined) return null;
  return Math.min(Math.max((worker.blocks - worker.free_blocks) / worker.blocks, 0), 1);
}

const NUMBERS = ["running", "waiting", "pinned", "leases", "handoffs", "bytes", "alone"];
const COLUMNS = ["worker", "role", "state", "running", "waiting", "cache", "pinned", "leases", "age", "handoffs", "bytes", "alone", "host", "drain"];

export class Workers {
  constructor(table, none, note) {
    this.table = table;
    this.none = none;
    this.note = note;
    this.rows = new Keyed(table.tBodies[0], () => this.make());
  }

  make() {
    const cells = {};
    for (const name of COLUMNS) {
      cells[name] = name === "worker" ? h("th", { scope: "row" }) : h("td", { class: NUMBERS.includes(name) ? "number" : null, "data-cell": name });
    }
    const sign = h("span", { class: "sign", "aria-hidden": "true" });
    const word = h("span", {});
    const state = h("span", { class: "state" }, sign, word);
    cells.state.append(state);
    const cache = meter();
    const age = meter();
    cells.cache.append(cache.root);
    cells.age.append(age.root);
    return { root: h("tr", {}, ...Object.values(cells)), cells, state, sign, word, cache, age, command: "" };
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
      const used = usedShare(worker);
      const resets = worker.resets ? `, reset ${count(worker.resets)}×` : "";
      setMeter(row.cache, used ?? 0, 1, used === null ? "–" : `${percent(used)} of ${count(worker.blocks)}${resets}`);
      setAttr(cells.cache, "title", resets ? `its prefix cache was reset, since a member was removed: ${count(worker.reset_blocks)} cached blocks dropped` : null);
      const oldest = worker.oldest_lease_s;
      const bound = worker.lease_max_s;
      const age = oldest === undefined ? "–" : worker.leases ? `${seconds(oldest)}${bound ? ` of ${seconds(bound)}` : ""}` : "none";
      setMeter(row.age, worker.leases ? (oldest ?? 0) : 0, bound ?? 0, age);
      setText(cells.running, count(worker.running));
      setText(cells.waiting, count(worker.waiting));
      setText(cells.pinned, count(worker.pins));
      setText(cells.leases, count(worker.leases));
      setText(cells.handoffs, worker.handoffs_s ? rate(worker.handoffs_s) : "–");
      setText(cells.bytes, worker.bytes_s ? bytesRate(worker.bytes_s) : "–");
      setText(cells.alone, percent(worker.alone));
      setText(cells.host, [worker.host ?? "", worker.version ?? ""].filter(Boolean).join(", ") || "–");
      setAttr(cells.host, "title", worker.address ?? null);
      this.offerDrain(row, worker, state.router.drain);
    });
    this.table.hidden = state.workers.length === 0;
    this.none.hidden = state.workers.length > 0;
    const more = state.workers_all - state.workers.length;
    const states = Object.entries(state.states).map(([name, number]) => `${number} ${name}`).join(", ");
    setText(this.note, [states, more > 0 ? `${count(more)} not shown` : "", `rates of the last ${seconds(state.windows.rates_s)}`].filter(Boolean).join(" · "));
  }

  /** The command that drains it, to be copied: this page itself changes nothing. */
  offerDrain(row, worker, drain) {
    const command = drain && worker.state !== "gone" && /^[\w.-]{1,128}$/.test(worker.name) ? `${drain} ${worker.name}` : "";
    if (command === row.command) return;
    row.command = command;
    row.cells.drain.replaceChildren(...(command ? [copyButton(command, `the command that drains ${worker.name}`)] : []));
    setAttr(row.cells.drain, "title", command || null);
  }
}
