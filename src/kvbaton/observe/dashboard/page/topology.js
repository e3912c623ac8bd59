// Who hands to whom: prefill workers on the left, decode workers on the right, the router above, a store below.
// Law: nodes and links are made once and changed in place; how many there are is bounded by the state.

import { Keyed, h, s, setAttr, setText } from "./dom.js";
import { bytesRate, count, percent, rate, short } from "./format.js";
import { stateOf, usedShare } from "./workers.js";

const TOP = 62;
const SPAN = 232; // what the workers fill, where they are few
const LABELS_MAX = 12;

/** Where everything stands, for a width in pixels. */
export function layout(workers, width, hasStore) {
  const left = [];
  const right = [];
  workers.forEach((worker, index) => (worker.role === "decode" ? right : left).push(index));
  const rows = Math.max(left.length, right.length, 1);
  const dense = rows > 6;
  const nodeWidth = Math.round(Math.min(Math.max(width * 0.25, 112), 196));
  const nodeHeight = dense ? 26 : 64;
  const gap = dense ? 8 : Math.min(Math.max((SPAN - rows * nodeHeight) / Math.max(rows - 1, 1), 16), 74);
  const height = TOP + rows * (nodeHeight + gap) - gap + (hasStore ? 60 : 10);
  const places = new Array(workers.length);
  for (const [column, x] of [[left, 1], [right, width - nodeWidth - 1]]) {
    const free = rows * (nodeHeight + gap) - column.length * (nodeHeight + gap);
    column.forEach((index, row) => {
      places[index] = { x, y: TOP + free / 2 + row * (nodeHeight + gap), width: nodeWidth, height: nodeHeight };
    });
  }
  const middle = width / 2;
  return { places, dense, width, height, nodeWidth, router: { x: middle - 78, y: 2, width: 156, height: 36 },
    store: hasStore ? { x: middle - 62, y: height - 40, width: 124, height: 36 } : null,
    left: left.length > 0, right: right.length > 0 };
}

/** The curve of a link: from P's right side to D's left side, each link with a port of its own. */
export function curve(from, to, outPort, inPort) {
  const x1 = from.x + from.width;
  const x2 = to.x;
  const y1 = from.y + from.height * outPort;
  const y2 = to.y + to.height * inPort;
  const bend = Math.max((x2 - x1) * 0.45, 12);
  return { x1, y1, x2, y2, bend, d: `M${x1} ${y1.toFixed(1)}C${x1 + bend} ${y1.toFixed(1)} ${x2 - bend} ${y2.toFixed(1)} ${x2} ${y2.toFixed(1)}` };
}

/** The point at `t` (0 to 1) of a curve. */
export function pointAt({ x1, y1, x2, y2, bend }, t) {
  const u = 1 - t;
  const a = u * u * u;
  const b = 3 * u * u * t;
  const c = 3 * u * t * t;
  const e = t * t * t;
  return { x: a * x1 + b * (x1 + bend) + c * (x2 - bend) + e * x2, y: a * y1 + b * y1 + c * y2 + e * y2 };
}

export class Topology {
  constructor(stage, links, linksMore) {
    this.stage = stage;
    this.linksMore = linksMore;
    this.buses = s("path", { class: "bus" });
    const linkLayer = s("g", { class: "links" });
    const labelLayer = s("g", { class: "labels" });
    this.dotLayer = s("g", { class: "dots" });
    const nodeLayer = s("g", { class: "nodes" });
    this.router = this.makeHub("router");
    this.store = this.makeHub("store");
    nodeLayer.append(this.router.root, this.store.root);
    this.title = s("title", { id: "topology-text" });
    this.svg = s("svg", { class: "map", role: "img", "aria-labelledby": "topology-text" },
      this.title, this.buses, linkLayer, this.dotLayer, labelLayer, nodeLayer);
    stage.append(this.svg);
    this.nodes = new Keyed(s("g", {}), () => this.makeNode());
    nodeLayer.append(this.nodes.parent);
    this.links = new Keyed(linkLayer, () => {
      const root = s("path", { class: "link" }, s("title", {}));
      return { root, title: root.firstChild };
    });
    this.labels = new Keyed(labelLayer, () => ({ root: s("text", { class: "label", "text-anchor": "middle" }) }));
    this.table = new Keyed(links.tBodies[0], () => {
      const cells = ["", "", "", "number", "number"].map((kind) => h("td", { class: kind || null }));
      return { root: h("tr", {}, ...cells), cells };
    });
    this.curves = new Map();
    this.state = null;
    new ResizeObserver(() => this.state && this.update(this.state)).observe(stage);
  }

  makeHub(name) {
    const box = s("rect", { class: "box", rx: 8 });
    const text = s("text", { class: "name", "text-anchor": "middle" }, name);
    const more = s("text", { class: "fine", "text-anchor": "middle" });
    return { root: s("g", { class: "node hub", "data-node": name }, box, text, more), box, text, more };
  }

  makeNode() {
    const parts = {
      title: s("title", {}),
      box: s("rect", { class: "box", rx: 8 }),
      edge: s("rect", { class: "edge", rx: 2 }),
      name: s("text", { class: "name" }),
      state: s("text", { class: "state", "text-anchor": "end" }),
      line: s("text", { class: "fine" }),
      track: s("rect", { class: "rail", rx: 2, height: 4 }),
      fill: s("rect", { class: "level", rx: 2, height: 4 }),
    };
    return { root: s("g", { class: "node" }, ...Object.values(parts)), ...parts };
  }

  update(state) {
    this.state = state;
    const width = Math.max(Math.floor(this.stage.clientWidth), 280);
    const hasStore = state.workers.some((worker) => worker.store);
    const plan = layout(state.workers, width, hasStore);
    this.plan = plan;
    setAttr(this.svg, "viewBox", `0 0 ${width} ${plan.height}`);
    setAttr(this.svg, "width", width);
    setAttr(this.svg, "height", plan.height);
    this.svg.classList.toggle("dense", plan.dense);
    this.drawHubs(state, plan);
    const items = state.workers.map((worker, index) => ({ worker, place: plan.places[index] }));
    this.nodes.update(items, ({ worker }) => worker.name, (node, item) => this.drawNode(node, item.worker, item.place, plan));
    this.drawLinks(state, plan);
    setText(this.title, describe(state));
  }

  drawHubs(state, plan) {
    place(this.router, plan.router);
    setText(this.router.more, `${count(state.now.in_flight)} in flight${state.router.draining ? " · draining" : ""}`);
    setAttr(this.store.root, "display", plan.store ? null : "none");
    if (plan.store) {
      place(this.store, plan.store);
      setText(this.store.more, "shared");
    }
    const { router, nodeWidth, width } = plan;
    const y = router.y + router.height / 2;
    const bus = (x1, x2) => `M${x1} ${y}H${x2 + Math.sign(x1 - x2) * 8}Q${x2} ${y} ${x2} ${y + 8}V${TOP - 4}`;
    const paths = [];
    if (plan.left) paths.push(bus(router.x, nodeWidth / 2));
    if (plan.right) paths.push(bus(router.x + router.width, width - nodeWidth / 2));
    setAttr(this.buses, "d", paths.join(""));
  }

  drawNode(node, worker, at, plan) {
    const standing = stateOf(worker);
    setAttr(node.root, "transform", `translate(${at.x} ${at.y.toFixed(1)})`);
    setAttr(node.root, "data-node", worker.name);
    setAttr(node.root, "data-role", worker.role);
    setAttr(node.root, "data-state", standing.key);
    setAttr(node.box, "width", at.width);
    setAttr(node.box, "height", at.height);
    setAttr(node.edge, "x", worker.role === "decode" ? at.width - 4 : 0);
    setAttr(node.edge, "width", 4);
    setAttr(node.edge, "height", at.height);
    const base = plan.dense ? 17 : 22;
    setAttr(node.name, "x", 13);
    setAttr(node.name, "y", base);
    setAttr(node.state, "x", at.width - 13);
    setAttr(node.state, "y", base);
    const room = Math.floor((at.width - 26) / 7.2);
    const word = standing.key === "silent" ? "silent" : standing.text;
    const says = (plan.dense && standing.key === "ready") || word.length + 8 > room ? standing.sign : `${standing.sign} ${word}`;
    setText(node.state, says);
    setText(node.name, short(worker.name, Math.max(room - says.length - 1, 9)));
    setText(node.line, plan.dense ? "" : nodeLine(worker, at.width));
    setAttr(node.line, "x", 13);
    setAttr(node.line, "y", 41);
    const full = at.width - 26;
    const used = usedShare(worker);
    for (const part of [node.track, node.fill]) {
      setAttr(part, "x", 13);
      setAttr(part, "y", at.height - 12);
      setAttr(part, "display", plan.dense || used === null ? "none" : null);
    }
    setAttr(node.track, "width", full);
    setAttr(node.fill, "width", (full * (used ?? 0)).toFixed(1));
    const cache = used === null ? "" : `; ${percent(used)} of the KV cache used`;
    setText(node.title, `${worker.name}: ${worker.role}, ${standing.text}${cache}${worker.note ? `; ${worker.note}` : ""}`);
  }

  /** Where the labels of links stand: on their link, none over another; one for which there is no room has none. */
  placeLabels(links, key, width) {
    const spots = new Map();
    const ordered = [...links].sort((a, b) => a.from - b.from || a.to - b.to); // not by rate: they would jump
    for (const link of ordered) {
      const path = this.curves.get(key(link));
      const free = (at) => [...spots.values()].every((other) => Math.abs(other.x - at.x) > width || Math.abs(other.y - at.y) > 15);
      const inside = (at) => at.x - width / 2 > path.x1 && at.x + width / 2 < path.x2;
      const spot = [0.32, 0.68, 0.5, 0.24, 0.76, 0.4, 0.6].map((t) => pointAt(path, t)).find((at) => free(at) && inside(at));
      if (spot) spots.set(key(link), spot);
    }
    return spots;
  }

  drawLinks(state, plan) {
    const most = Math.max(...state.links.map((link) => link.handoffs_s), 1e-9);
    const thickest = state.links.length > LABELS_MAX ? 1.5 : 4.75;
    const out = new Map();
    const into = new Map();
    for (const link of state.links) {
      out.set(link.from, [...(out.get(link.from) ?? []), link.to].sort((a, b) => a - b));
      into.set(link.to, [...(into.get(link.to) ?? []), link.from].sort((a, b) => a - b));
    }
    const port = (peers, peer) => (peers.indexOf(peer) + 1) / (peers.length + 1);
    this.curves.clear();
    for (const link of state.links) {
      const [from, to] = [plan.places[link.from], plan.places[link.to]];
      if (from && to) this.curves.set(`${link.from}>${link.to}`, curve(from, to, port(out.get(link.from), link.to), port(into.get(link.to), link.from)));
    }
    const drawn = state.links.filter((link) => this.curves.has(`${link.from}>${link.to}`));
    const key = (link) => `${link.from}>${link.to}`;
    const name = (index) => state.workers[index]?.name ?? "?";
    const idle = (link) => !link.handoffs_s;
    this.links.update(drawn, key, (row, link) => {
      setAttr(row.root, "d", this.curves.get(key(link)).d);
      setAttr(row.root, "stroke-width", (1.25 + thickest * Math.sqrt(link.handoffs_s / most)).toFixed(2));
      setAttr(row.root, "data-link", `${name(link.from)}>${name(link.to)}`);
      setAttr(row.root, "data-transport", link.transport);
      row.root.classList.toggle("idle", idle(link));
      setText(row.title, `${name(link.from)} to ${name(link.to)}: ${link.transport || "no data plane yet"}, ${rate(link.handoffs_s)} handoffs/s, about ${bytesRate(link.bytes_s)}`);
    });
    const narrow = plan.width - 2 * plan.nodeWidth < 330;
    const spots = this.placeLabels(drawn.length <= LABELS_MAX ? drawn : [], key, narrow ? 44 : 108);
    this.labels.update(drawn.filter((link) => spots.has(key(link))), key, (label, link) => {
      const at = spots.get(key(link));
      setAttr(label.root, "x", at.x.toFixed(1));
      setAttr(label.root, "y", (at.y - 9).toFixed(1));
      const plane = link.transport || "–";
      setText(label.root, idle(link) || narrow ? plane : `${plane} · ${rate(link.handoffs_s)}/s`);
    });
    this.table.update(state.links, key, ({ cells }, link) => {
      const texts = [name(link.from), name(link.to), link.transport || "none yet", rate(link.handoffs_s), bytesRate(link.bytes_s)];
      texts.forEach((text, column) => setText(cells[column], text));
    });
    this.linksMore.hidden = state.links.length === 0;
    const more = state.links_all > state.links.length ? ` (the ${count(state.links.length)} busiest of ${count(state.links_all)})` : "";
    setText(this.linksMore.querySelector("summary"), `Links as a table${more}`);
  }
}

function place(hub, at) {
  setAttr(hub.root, "transform", `translate(${at.x} ${at.y})`);
  setAttr(hub.box, "width", at.width);
  setAttr(hub.box, "height", at.height);
  for (const [part, y] of [[hub.text, 15], [hub.more, 29]]) {
    setAttr(part, "x", at.width / 2);
    setAttr(part, "y", y);
  }
}

function nodeLine(worker, width) {
  if (worker.state === "gone") return "left the list";
  if (worker.blocks === undefined) return "tells nothing";
  if (worker.waiting !== undefined) return width > 150 ? `${count(worker.running)} running · ${count(worker.waiting)} waiting` : `${count(worker.waiting)} waiting`;
  const pins = `${count(worker.pins)} pinned`;
  return width > 150 ? `${pins} · ${count(worker.leases)} ${worker.leases === 1 ? "lease" : "leases"}` : pins;
}

function describe(state) {
  const roles = (role) => state.workers.filter((worker) => worker.role === role).length;
  const names = state.links.slice(0, 6).map((link) =>
    `${state.workers[link.from]?.name} to ${state.workers[link.to]?.name} by ${link.transport || "no data plane"}`);
  return `${roles("prefill")} prefill and ${roles("decode")} decode workers behind a router; ${state.links_all} links${names.length ? `: ${names.join(", ")}` : ""}.`;
}
