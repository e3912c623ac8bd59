// The operator's key, for a page that is opened from another machine than the router's.
// Law: it is kept for this tab alone, goes only to where the page came from, and stands in no address.

import { byId, setText } from "./dom.js";

const PLACE = "kvbaton-operator-key";
const KEY = /^[!-~]{8,512}$/;

let key = "";
let refused = false;
let mistyped = false; // what was said of that stands until something else is typed
try {
  key = sessionStorage.getItem(PLACE) ?? "";
} catch {
  // storage is switched off: the key lasts as long as the page
}

/** The router's answer; where it wants a key, or another one, the page asks for it. */
export async function answerOf(url, ms) {
  refused = false; // no answer is no refusal
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(url, { signal: AbortSignal.timeout(ms), cache: "no-store", redirect: "error", headers });
  refused = answer.status === 401 || answer.status === 403;
  if (refused && !mistyped) setText(byId("key-note"), key ? "The router does not take this key as an operator's." : "From another machine the router shows this page to operators only.");
  byId("key").hidden = !refused;
  return answer;
}

export const isRefused = () => refused;

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = byId("key-text").value.trim();
  byId("key-text").value = "";
  mistyped = !KEY.test(typed);
  if (mistyped) return setText(byId("key-note"), "A key has 8 to 512 printable characters.");
  key = typed;
  try {
    sessionStorage.setItem(PLACE, key);
  } catch {
    // as above
  }
  byId("retry").click();
});
