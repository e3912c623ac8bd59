// The last failures, newest first. One of them is in the tab order; arrows go from one to the next.

import { Keyed, h, setAttr, setText } from "./dom.js";
import { ago, short, words } from "./format.js";

export class Failures {
  constructor(list, none, note, open) {
    this.list = list;
    this.none = none;
    this.note = note;
    this.open = open;
    this.rows = new Keyed(list, (failure) => this.make(failure));
    list.addEventListener("keydown", (event) => this.walk(event));
    list.addEventListener("focusin", (event) => this.settle(event.target.closest("button")));
  }

  make(failure) {
    const reason = h("strong", {});
    const when = h("span", { class: "when" });
    const route = h("span", { class: "route" });
    const detail = h("span", { class: "detail" });
    const button = h("button", { type: "button", class: "failure", tabindex: "-1", "data-find": failure.find },
      h("span", { class: "sign", "aria-hidden": "true" }, "✕"), reason, when, route, detail);
    button.addEventListener("click", () => this.open(failure));
    return { root: h("li", {}, button), button, reason, when, route, detail };
  }

  update(state) {
    const seen = new Map(); // not by time, which is another one when the next side has told: the row would lose the focus
    const nth = (find) => seen.set(find, (seen.get(find) ?? 0) + 1).get(find);
    this.rows.update(state.failures, (failure) => `${failure.find} ${nth(failure.find)}`, (row, failure) => {
      setText(row.reason, words(failure.reason));
      setText(row.when, ago(failure.ago_s));
      const path = failure.source || failure.target ? `${failure.source || "–"} → ${failure.target || "–"}` : "";
      const answered = failure.answered ? "the client was answered all the same" : "";
      setText(row.route, [path, short(failure.request || failure.handoff || failure.find), answered].filter(Boolean).join(" · "));
      setAttr(row.button, "data-answered", failure.answered);
      setText(row.detail, failure.detail);
      setAttr(row.button, "data-reason", failure.reason);
    });
    this.none.hidden = state.failures.length > 0;
    this.list.hidden = state.failures.length === 0;
    setText(this.note, state.failures.length ? "Enter opens the timeline" : "");
    if (!this.list.querySelector('button[tabindex="0"]')) this.settle(this.list.querySelector("button"));
  }

  settle(button) {
    if (!button) return;
    for (const each of this.list.querySelectorAll('button[tabindex="0"]')) if (each !== button) each.tabIndex = -1;
    button.tabIndex = 0;
  }

  walk(event) {
    const buttons = [...this.list.querySelectorAll("button")];
    const here = buttons.indexOf(document.activeElement);
    const to = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined || here < 0) return;
    event.preventDefault();
    buttons[Math.min(Math.max(to, 0), buttons.length - 1)].focus();
  }
}
