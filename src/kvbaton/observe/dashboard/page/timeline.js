// One handoff as a picture: a lane for each side that saw it, on one clock, and the same as tables.

import { h, s } from "./dom.js";
import { bytes, count, ms, words } from "./format.js";

const LANE = 58;
const LEFT = 92;
const RIGHT = 16;
const SEATS = { router: "router", prefill: "P", decode: "D" };
const ORDER = ["router", "prefill", "decode"];

/** The lanes of a journey: who saw what when, in seconds from its first moment. */
export function lanesOf(journey) {
  const lanes = (journey.lanes ?? []).map((lane) => {
    const moments = (lane.moments ?? []).map(([step, at, detail]) => ({ step, at, detail: detail ?? "" }));
    return { ...lane, moments: moments.sort((a, b) => a.at - b.at) };
  });
  lanes.sort((a, b) => ORDER.indexOf(a.seat) - ORDER.indexOf(b.seat));
  const last = Math.max(...lanes.flatMap((lane) => lane.moments.map((moment) => moment.at)), 0);
  return { lanes, first: journey.began ?? 0, last };
}

const QUIET = ["", "delivered", "ok", "client_gone", "moved", "aborted", "cancelled", "discarded"];

/** Whether a lane ended with a failure: not by the client's mistake, nor when nobody waited for it any more. */
export const isBad = ({ end, mistake }) => Boolean(end) && !mistake && !QUIET.includes(end);

/** Until when the handoff lasted, or the first byte of the answer came: what follows is the answer. */
function handoffEnd({ lanes, last }) {
  const own = lanes.flatMap((lane) => lane.moments.filter(({ step }) => (lane.seat === "router" ? step === "first_byte" : step !== "rested")));
  return own.length ? Math.max(...own.map((moment) => moment.at)) : last;
}

export function drawTimeline(found, width) {
  const box = h("div", { class: "timeline" });
  const end = handoffEnd(found);
  const zoomed = end > 0 && end < 0.5 * found.last;
  const choose = h("div", { class: "zoom", role: "group", "aria-label": "Part shown" });
  const show = (part) => {
    const to = part === "handoff" ? Math.min(end * 1.05, found.last) : found.last;
    box.querySelector("svg")?.remove();
    box.append(picture(found, { from: 0, to }, width));
    for (const button of choose.children) button.setAttribute("aria-pressed", String(button.dataset.part === part));
  };
  if (zoomed) {
    for (const [part, text] of [["handoff", "Until the first byte"], ["whole", "Whole request"]]) {
      choose.append(h("button", { type: "button", class: "plain", "data-part": part, onclick: () => show(part) }, text));
    }
    box.append(choose);
  }
  show(zoomed ? "handoff" : "whole");
  return box;
}

function picture({ lanes }, { from, to }, width) {
  const inner = width - LEFT - RIGHT;
  const length = Math.max(to - from, 1e-6);
  const x = (at) => LEFT + (inner * (at - from)) / length;
  const height = lanes.length * LANE + 26;
  const svg = s("svg", { class: "lanes", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Timeline over ${ms(length * 1000)}; the table below says the same` });
  for (let tick = 0; tick <= 4; tick += 1) {
    const at = from + (length * tick) / 4;
    const anchor = tick === 0 ? "start" : tick === 4 ? "end" : "middle";
    svg.append(s("line", { class: "grid", x1: x(at), x2: x(at), y1: 4, y2: height - 20 }),
      s("text", { class: "fine", x: x(at), y: height - 6, "text-anchor": anchor }, ms(at * 1000)));
  }
  lanes.forEach((lane, row) => svg.append(drawLane(lane, row * LANE + 8, x, from, to)));
  return svg;
}

function drawLane(lane, y, x, from, to) {
  const inside = lane.moments.filter((moment) => moment.at >= from - 1e-9 && moment.at <= to + 1e-9);
  const root = s("g", { class: "lane", "data-lane": lane.seat, "data-bad": isBad(lane) },
    s("text", { class: "name", x: 0, y: y + 14 }, SEATS[lane.seat] ?? lane.seat),
    s("text", { class: "fine", x: 0, y: y + 29 }, cut(lane.seat === "router" ? "" : lane.worker, 13)));
  if (lane.moments.length > 1) {
    const begin = Math.max(lane.moments[0].at, from);
    const end = Math.min(lane.moments.at(-1).at, to);
    if (end >= begin) root.append(s("rect", { class: "span", x: x(begin), y: y + 6, width: Math.max(x(end) - x(begin), 1.5), height: 8, rx: 4 }));
  }
  const ends = [-1e9, -1e9]; // where the last label of each of two rows of text ended
  for (const moment of inside) {
    const at = x(moment.at);
    const bad = isBad(lane) && ["ended", "closed"].includes(moment.step);
    root.append(bad
      ? s("path", { class: "mark bad", d: `M${at - 4} ${y + 6}l8 8m0 -8l-8 8` }, s("title", {}, lane.end))
      : s("circle", { class: "mark", cx: at, cy: y + 10, r: 3.5 }, s("title", {}, `${words(moment.step)} at ${ms(moment.at * 1000)}`)));
    const text = bad ? words(lane.end) : words(moment.step);
    const size = text.length * 6.1;
    const right = x(to);
    const start = Math.min(at - 3, right - size);
    const line = ends.findIndex((end) => start > end + 6);
    if (line >= 0) {
      ends[line] = start + size;
      root.append(s("text", { class: bad ? "step bad" : "step", x: start, y: y + 27 + line * 12 }, text));
    }
  }
  return root;
}

const who = ({ seat, worker }) => (seat === "router" ? "router" : `${SEATS[seat] ?? seat} ${worker}`);

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Stages of all sides; what was not come to has no row. */
export function stageTable(stages) {
  if (!stages?.length) return null;
  const longest = Math.max(...stages.map((stage) => stage.end_s - stage.begin_s), 1e-9);
  const rows = stages.map((stage) => {
    const fill = h("span", { class: "fill" });
    fill.style.width = `max(2px, ${((100 * (stage.end_s - stage.begin_s)) / longest).toFixed(1)}%)`;
    return h("tr", { "data-stage": stage.name }, h("td", {}, who(stage)), h("th", { scope: "row" }, words(stage.name)), h("td", { class: "number" }, ms((stage.end_s - stage.begin_s) * 1000)),
      h("td", { class: "bars" }, h("span", { class: "track", "aria-hidden": "true" }, fill)));
  });
  return h("table", { class: "small stage-times" }, h("caption", {}, "Stages"), h("tbody", {}, ...rows));
}

/** Every moment of every lane, in order. */
export function momentTable(lanes) {
  const all = lanes.flatMap((lane) => lane.moments.map((moment) => ({ ...moment, lane })));
  all.sort((a, b) => a.at - b.at);
  const rows = all.map(({ step, at, detail, lane }) => h("tr", {},
    h("td", { class: "number" }, ms(at * 1000)), h("td", {}, who(lane)), h("td", {}, words(step)), h("td", { class: "wrap" }, detail)));
  return h("table", { class: "small moments" }, h("caption", {}, "Every moment"),
    h("thead", {}, h("tr", {}, ...[["at", "number"], ["who", null], ["what", null], ["detail", null]].map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
    h("tbody", {}, ...rows));
}

/** What each side says of its part. */
export function sideTable(lanes, missing) {
  const rows = lanes.map((lane) => h("tr", {},
    h("th", { scope: "row" }, who(lane)),
    h("td", { class: isBad(lane) ? "bad" : null }, `${lane.end ? words(lane.end) : "under way"}${lane.gone ? " (gone since)" : ""}`),
    h("td", {}, lane.transport || "–"), h("td", { class: "number" }, lane.bytes ? bytes(lane.bytes) : "–"),
    h("td", { class: "number" }, count(lane.retries ?? 0)), h("td", { class: "wrap" }, lane.detail ?? "")));
  for (const side of missing ?? []) rows.push(h("tr", { class: "missing" }, h("th", { scope: "row" }, who(side)), h("td", { colspan: 5 }, side.why)));
  return h("table", { class: "small sides" }, h("caption", {}, "Sides"),
    h("thead", {}, h("tr", {}, ...["who", "end", "data plane", "bytes", "retries", "detail"].map((name) => h("th", { scope: "col", class: ["bytes", "retries"].includes(name) ? "number" : null }, name)))),
    h("tbody", {}, ...rows));
}
