// The page: asks the router for its state once a second and hands it to the parts.
// Law: one question at a time; a hidden tab asks rarely; a router that does not answer is asked ever more rarely, and
// what was last known stays, greyed.

import { byId, copyButton, h, setAttr, setText } from "./dom.js";
import { Dots } from "./dots.js";
import { Drawer } from "./drawer.js";
import { Failures } from "./failures.js";
import { count, seconds } from "./format.js";
import { answerOf, isRefused } from "./key.js";
import { Stages } from "./stages.js";
import { Tiles } from "./tiles.js";
import { Topology } from "./topology.js";
import { Workers } from "./workers.js";

const POLL_MS = 1000;
const HIDDEN_MS = 10000;
const ANSWER_MS = 10000;
const BACKOFF_MS = [1000, 2000, 4000, 8000, 15000];
const STATE = new URL("./state", import.meta.url);

const drawer = new Drawer();
const topology = new Topology(byId("stage"), byId("links"), byId("links-more"));
const dots = new Dots(topology);
const parts = [
  new Tiles(byId("tiles")), topology, dots, new Stages(byId("stages"), byId("stages-note")),
  new Failures(byId("failures"), byId("failures-none"), byId("failures-note"), (failure) => drawer.failure(failure)),
  new Workers(byId("workers"), byId("workers-none"), byId("workers-note")),
];

function show(state) {
  for (const part of parts) part.update(state);
  const { router } = state;
  setText(byId("facts"), [`router ${router.version}${router.host ? ` on ${router.host}` : ""}`, `mode ${router.mode}`, `up ${seconds(router.uptime_s)}`, router.draining ? "draining" : ""].filter(Boolean).join(" · "));
  const dot = Math.max(Math.round(state.now.handoffs_s / 45), 1);
  const window = `last ${seconds(state.windows.rates_s)}`;
  byId("trouble").hidden = !state.trouble;
  setText(byId("trouble"), state.trouble?.text ?? "");
  setAttr(byId("trouble"), "data-down", state.trouble?.is_down);
  setText(byId("legend"), `○ under way  ● delivered  ✕ failed${dot > 1 ? ` (a dot stands for about ${count(dot)})` : ""} · lines: handoffs per second, ${window}`);
  showEmpty(state);
}

let emptyKind = "";

/** What to do next, where there is nothing to draw yet. */
function showEmpty(state) {
  const kind = state.workers.length === 0 ? "workers" : state.now.ended === 0 && state.history.handoffs.every((value) => !value) ? (state.router.uptime_s > 170 ? "quiet" : "handoffs") : "";
  const box = byId("empty");
  byId("stage").hidden = kind === "workers";
  box.hidden = kind === "";
  if (kind === emptyKind) return;
  emptyKind = kind;
  const body = '{"prompt": "Once upon a time", "max_tokens": 32, "stream": true}';
  const curl = `curl -N ${location.origin}/v1/completions -H 'Content-Type: application/json' -d '${body}'`;
  const lines = {
    workers: ["No workers yet.", "A worker registers by itself when it starts with this router's registry and keys. A whole cluster on one machine:", "kvbaton up --prefill 2 --decode 2"],
    handoffs: ["No handoffs yet.", "Send a prompt:", curl],
    quiet: ["No handoffs in the last three minutes.", "Send a prompt:", curl],
  }[kind];
  box.replaceChildren(...(lines ? [h("p", {}, h("strong", {}, lines[0]), " ", lines[1]), h("p", { class: "command" }, h("code", {}, lines[2]), copyButton(lines[2], "the command"))] : []));
}

// --- asking

let failures = 0;
let answered = performance.now();
let timer = 0;
let asking = false;
let nextAt = 0;

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  let wait = document.hidden ? HIDDEN_MS : POLL_MS;
  try {
    const answer = await answerOf(STATE, ANSWER_MS);
    if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
    show(await answer.json());
    failures = 0;
    answered = performance.now();
  } catch (error) {
    wait = Math.max(wait, BACKOFF_MS[Math.min(failures, BACKOFF_MS.length - 1)]);
    failures += 1;
    if (!(error instanceof TypeError || error instanceof DOMException || error instanceof SyntaxError) && failures === 1) console.warn(error.message);
  } finally {
    asking = false;
  }
  nextAt = performance.now() + wait;
  timer = setTimeout(poll, wait);
  showBanner();
}

/** Whether what is seen is now, and if not, since when and what happens next. */
function showBanner() {
  const lost = failures > 0;
  byId("banner").hidden = !lost || isRefused();
  setAttr(document.body, "data-stale", lost);
  if (!lost) return;
  const since = seconds((performance.now() - answered) / 1000);
  const next = Math.max(Math.ceil((nextAt - performance.now()) / 1000), 0);
  setText(byId("banner-text"), `No answer from the router for ${since}. What you see is from before; next try in ${next} s.`);
}

setInterval(() => failures > 0 && showBanner(), 1000);
byId("retry").addEventListener("click", poll);
document.addEventListener("visibilitychange", () => {
  dots.clear();
  if (!document.hidden) poll();
});

// --- keys

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("find").value.trim();
  if (id) drawer.search(id);
});
byId("recent").addEventListener("click", () => drawer.recent());
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, [contenteditable]");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey || byId("drawer").open) return;
  event.preventDefault();
  byId("find").focus();
  byId("find").select();
});

poll();
