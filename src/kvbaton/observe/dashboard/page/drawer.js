// The drawer: handoffs found by an id, or the last ones; each with its timeline. Esc closes it and returns the focus.

import { byId, copyButton, h, setText } from "./dom.js";
import { ago, clock, short, words } from "./format.js";
import { answerOf } from "./key.js";
import { drawTimeline, isBad, lanesOf, momentTable, sideTable, stageTable } from "./timeline.js";

const FETCH_MS = 6000;
const FLIGHTS = new URL("../flights", import.meta.url);
const REASONS = new URL("./reasons", import.meta.url);
const ACTORS = {
  caller: " To act: the sender of the request.",
  peer: " To act: the other engine; look at its log.",
  operator: " To act: the operator (configuration, capacity or network).",
  nobody: " Nobody need act.",
  makers: " This is a bug of kvbaton: please report it.",
};

export class Drawer {
  constructor() {
    this.dialog = byId("drawer");
    this.title = byId("drawer-title");
    this.body = byId("drawer-body");
    this.asked = 0;
    this.reasons = null;
    byId("drawer-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
    this.dialog.addEventListener("close", () => {
      this.asked += 1;
      this.body.replaceChildren();
    });
  }

  /** One failure of the list. */
  failure(failure) {
    return this.show(`Request ${short(failure.request || failure.find, 44)}`, { id: failure.find }, failure);
  }

  /** What a search says. */
  search(id) {
    return this.show(`Search: ${short(id, 44)}`, { id });
  }

  recent() {
    return this.show("Recent handoffs", { last: "20" });
  }

  async show(title, query, failure = null) {
    this.asked += 1;
    const mine = this.asked;
    setText(this.title, title);
    this.body.replaceChildren(h("p", { class: "quiet" }, "Loading…"));
    if (!this.dialog.open) this.dialog.showModal();
    this.title.focus();
    let journeys;
    try {
      [journeys, this.reasons] = await Promise.all([ask(query), this.reasons ?? explanations()]);
    } catch (error) {
      if (mine === this.asked) this.body.replaceChildren(h("p", { class: "quiet", role: "alert" }, `The router did not answer: ${error.message}. Close this and try again.`));
      return;
    }
    if (mine !== this.asked) return; // another was asked for, or it was closed
    if (!journeys.length) this.body.replaceChildren(...this.nothing(query, failure));
    else if (journeys.length === 1) this.body.replaceChildren(...this.detail(journeys[0]));
    else this.several(journeys, query, failure);
  }

  nothing(query, failure) {
    const parts = [h("p", { class: "quiet" }, query.id === undefined ? "No handoff has ended yet." : "Nothing with that id among the handoffs that are kept. The oldest are forgotten first; an id is found whole or by its beginning.")];
    if (failure) parts.unshift(...this.meaning({ end: failure.reason, detail: failure.detail, seat: "" }));
    return parts;
  }

  several(journeys, query, failure) {
    const detail = h("div", { class: "detail" });
    const list = h("ol", { class: "picks", "aria-label": "Handoffs" });
    const pick = (journey, button) => {
      for (const each of list.querySelectorAll("button")) each.removeAttribute("aria-current");
      button.setAttribute("aria-current", "true");
      detail.replaceChildren(...this.detail(journey));
    };
    const buttons = journeys.map((journey) => {
      const summary = summaryOf(journey);
      const button = h("button", { type: "button", class: "pick" }, h("span", { class: "sign", "aria-hidden": "true" }, summary.bad ? "✕" : summary.mistake ? "–" : summary.end ? "●" : "◌"),
        h("strong", {}, summary.end ? words(summary.end) : "under way"), h("span", {}, summary.route), h("span", { class: "mono" }, short(summary.request || summary.handoff, 24)));
      button.addEventListener("click", () => pick(journey, button));
      list.append(h("li", {}, button));
      return button;
    });
    list.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const here = buttons.indexOf(document.activeElement);
      if (step === undefined || here < 0) return;
      event.preventDefault();
      buttons[Math.min(Math.max(here + step, 0), buttons.length - 1)].focus();
    });
    this.body.replaceChildren(list, detail);
    const wanted = journeys.findIndex((journey) => (failure ? summaryOf(journey).end === failure.reason : summaryOf(journey).handoff === query.id));
    const first = wanted >= 0 ? wanted : Math.max(journeys.findIndex((journey) => summaryOf(journey).bad), 0);
    pick(journeys[first], buttons[first]);
  }

  detail(journey) {
    const summary = summaryOf(journey);
    const found = lanesOf(journey);
    const width = Math.max(Math.floor(this.body.clientWidth) - 34, 300);
    const verdict = h("p", { class: "verdict", "data-bad": summary.bad }, h("strong", { class: "reason" }, summary.end ? words(summary.end) : "under way"),
      h("span", {}, [summary.route, summary.mode, summary.transport, summary.tries, summary.bad && (summary.answered || summary.later) ? `the client was answered all the same${summary.later ? `: ${summary.later}` : ""}` : "", summary.mistake ? "the client's mistake" : ""].filter(Boolean).join(" · ")));
    const parts = [verdict];
    if (summary.bad || summary.mistake) parts.push(...this.meaning(summary));
    parts.push(drawTimeline(found, width), ids(summary, found), h("div", { class: "scroll" }, sideTable(found.lanes, journey.missing)));
    const stages = stageTable(journey.stages);
    if (stages) parts.push(stages);
    parts.push(h("div", { class: "scroll" }, momentTable(found.lanes)), this.further(summary));
    return parts;
  }

  /** What `kvbaton explain` says of it. */
  meaning({ end, detail, seat }) {
    const known = this.known(end, seat);
    const parts = detail ? [h("p", { class: "mono wrap" }, detail)] : [];
    if (!known) return parts;
    parts.push(h("p", { class: "meaning" }, known.means, ACTORS[known.who] ?? ""));
    for (const [name, list] of [["Usual causes", known.causes], ["What to do", known.do]]) {
      if (list?.length) parts.push(h("div", { class: "advice" }, h("h3", {}, name), h("ul", {}, ...list.map((text) => h("li", {}, text)))));
    }
    return parts;
  }

  /** The entry of a word: at the router an error's code, elsewhere a reason. */
  known(end, seat) {
    const kinds = seat === "router" || !seat ? ["api", "reason", "status"] : ["reason", "api", "status"];
    return kinds.map((kind) => this.reasons?.[kind]?.[end]).find(Boolean);
  }

  further(summary) {
    const id = summary.handoff || summary.request;
    const command = (text) => h("p", { class: "command" }, h("code", {}, text), copyButton(text, "the command"));
    const safe = /^[\w.:@-]{1,128}$/.test(id) && !id.startsWith("-"); // else a shell would read it as something else
    const parts = [];
    if (id && safe) parts.push(command(`kvbaton inspect ${id}`));
    if ((summary.bad || summary.mistake) && this.known(summary.end, summary.seat)) parts.push(command(`kvbaton explain ${summary.end}`));
    parts.push(h("p", {}, h("a", { href: "metrics" }, "Metrics of this router")));
    return h("section", { class: "further", "aria-label": "Further" }, ...parts);
  }
}

function ids(summary, found) {
  const row = (name, value) => (value ? [h("dt", {}, name), h("dd", {}, h("code", { class: "wrap" }, value), copyButton(value, name))] : []);
  const own = found.lanes.filter((lane) => lane.seat !== "router" && lane.request && lane.request !== summary.request);
  return h("dl", { class: "ids" }, ...row("request", summary.request), ...row("handoff", summary.handoff),
    ...own.flatMap((lane) => row(lane.seat === "prefill" ? "request at P" : "request at D", lane.request)), ...row("trace", summary.trace),
    h("dt", {}, "began"), h("dd", {}, `${clock(found.first)} · ${ago(Date.now() / 1000 - found.first)}`));
}

/** What a journey says of itself: a side that failed goes before the end that the client saw. */
function summaryOf(journey) {
  const lanes = journey.lanes ?? [];
  const seat = (name) => lanes.find((lane) => lane.seat === name) ?? (journey.missing ?? []).find((side) => side.seat === name);
  const failed = ["decode", "prefill", "router"].flatMap((name) => lanes.filter((lane) => lane.seat === name)).find(isBad);
  const moved = lanes.find((lane) => lane.seat === "router")?.moments?.find(([step]) => step === "moved")?.[2] ?? "";
  const [why, left] = moved.split(" ");
  const later = journey.answered_by === undefined || journey.answered_by === null ? "" : `try ${journey.answered_by + 1}`;
  return { bad: Boolean(failed), mistake: Boolean(journey.mistake), later, end: failed?.end ?? journey.end ?? "", detail: failed?.detail ?? "", seat: failed?.seat ?? "", answered: journey.end === "ok",
    route: `${seat("prefill")?.worker || "–"} → ${seat("decode")?.worker || "–"}`, mode: journey.mode ?? "", transport: journey.transport ?? "",
    request: journey.request ?? "", handoff: journey.handoff ?? "", trace: seat("router")?.trace ?? "",
    tries: (journey.tries ?? 1) > 1 ? `try ${(journey.number ?? 0) + 1} of ${journey.tries}${left ? `, which went on with an answer of ${left} (${why})` : ""}` : "" };
}

async function ask(query) {
  const url = new URL(FLIGHTS);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const answer = await answerOf(url, FETCH_MS);
  if (!answer.ok) throw new Error(`it answered ${answer.status}`);
  return (await answer.json()).journeys ?? [];
}

async function explanations() {
  const answer = await fetch(REASONS, { signal: AbortSignal.timeout(FETCH_MS) });
  return answer.ok ? answer.json() : {};
}
