// Handoffs moving along their links. Under way: a ring that waits where its request is. Ended: a disc that arrives at D,
// or a cross that stops on the way.
// Law: at most DOTS_MAX of them, whatever the load, from a pool; nothing runs when nothing moves.

import { s, setAttr } from "./dom.js";
import { pointAt } from "./topology.js";

export const DOTS_MAX = 60;
const WAITING_MAX = 24;
const TRAVEL_MS = 1200;
const SPREAD_MS = 1000;
const FADE_MS = 900;
const STOPS = { prefill: 0.05, handoff: 0.5 };
const SHAPES = {
  waiting: "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0",
  delivered: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
  failed: "M-4.5 -4.5L4.5 4.5M4.5 -4.5L-4.5 4.5",
};

export class Dots {
  constructor(topology) {
    this.topology = topology;
    this.active = [];
    this.free = [];
    this.made = 0;
    this.last = 0;
    this.frame = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
  }

  update(state) {
    const now = performance.now();
    if (this.still.matches) this.clear();
    this.follow(state, now);
    const fresh = state.ended.filter((each) => each.n > this.last);
    this.last = Math.max(this.last, ...state.ended.map((each) => each.n));
    const step = SPREAD_MS / Math.max(fresh.length, 1);
    fresh.forEach((each, index) => this.arrive(each, now + index * step));
    if (this.still.matches) this.draw(now);
    else if (!this.frame && this.active.length) this.frame = requestAnimationFrame((at) => this.run(at));
  }

  clear() {
    for (const dot of this.active) this.release(dot);
    this.active = [];
  }

  /** Those under way: new ones appear, known ones go to where they are now, lost ones end as arrived. */
  follow(state, now) {
    const ended = new Map(state.ended.filter((each) => each.key).map((each) => [each.key, each]));
    const here = new Map(state.under_way.filter((each) => STOPS[each.stage] !== undefined).map((each) => [each.key, each]));
    for (const dot of this.active) {
      if (!dot.waiting) continue;
      const known = here.get(dot.key);
      if (known) {
        dot.stop = STOPS[known.stage] + dot.offset;
        here.delete(dot.key);
        continue;
      }
      dot.waiting = false;
      this.depart(dot, ended.get(dot.key)?.failed ?? false, now, dot.t);
      dot.followed = true;
    }
    this.followed = new Set(this.active.filter((dot) => dot.followed).map((dot) => dot.key));
    let waiting = this.active.filter((dot) => dot.waiting).length;
    for (const each of here.values()) {
      if (waiting >= WAITING_MAX) break;
      const dot = this.take(each);
      if (!dot) break;
      waiting += 1;
      const offset = ((hash(each.key) % 100) / 100 - 0.5) * 0.08;
      Object.assign(dot, { waiting: true, key: each.key, t: 0, offset, stop: STOPS[each.stage] + offset, started: now });
      this.show(dot, "waiting");
    }
  }

  arrive(each, at) {
    if (each.key && this.followed.has(each.key)) return; // it was seen waiting, and goes on from there
    const dot = this.take(each);
    if (dot) this.depart(dot, each.failed, at, 0);
  }

  depart(dot, failed, at, from) {
    Object.assign(dot, { failed, started: at, from, to: failed ? Math.max(from, 0.6) : 1, t: from });
    this.show(dot, failed ? "failed" : "delivered");
  }

  take(each) {
    const path = `${each.from}>${each.to}`;
    if (!this.topology.curves.has(path)) return null;
    let root = this.free.pop();
    if (!root) {
      if (this.made >= DOTS_MAX) return null;
      this.made += 1;
      root = s("path", { class: "dot" });
      this.topology.dotLayer.append(root);
    }
    const dot = { root, path, key: "", waiting: false, followed: false, failed: false, t: 0, started: 0, from: 0, to: 1, stop: 0, offset: 0 };
    this.active.push(dot);
    return dot;
  }

  show(dot, kind) {
    setAttr(dot.root, "d", SHAPES[kind]);
    setAttr(dot.root, "data-kind", kind);
    setAttr(dot.root, "display", dot.started > performance.now() ? "none" : null);
    setAttr(dot.root, "opacity", null);
  }

  release(dot) {
    setAttr(dot.root, "display", "none");
    this.free.push(dot.root);
  }

  run(now) {
    this.frame = 0;
    this.draw(now);
    if (this.active.length) this.frame = requestAnimationFrame((at) => this.run(at));
  }

  draw(now) {
    this.active = this.active.filter((dot) => {
      const stays = this.advance(dot, now);
      if (!stays) this.release(dot);
      return stays;
    });
  }

  advance(dot, now) {
    const path = this.topology.curves.get(dot.path);
    if (!path) return false; // the link is gone
    if (dot.started > now && !this.still.matches) return true;
    if (this.still.matches) dot.t = dot.waiting ? dot.stop : 0.5 + dot.offset;
    else if (dot.waiting) dot.t += (dot.stop - dot.t) * 0.08;
    else {
      const share = Math.min((now - dot.started) / (TRAVEL_MS * Math.max(dot.to - dot.from, 0.2)), 1);
      dot.t = dot.from + (dot.to - dot.from) * (share * share * (3 - 2 * share));
      if (share >= 1) {
        const over = now - dot.started - TRAVEL_MS * Math.max(dot.to - dot.from, 0.2);
        if (!dot.failed || over > FADE_MS) return false;
        setAttr(dot.root, "opacity", (1 - over / FADE_MS).toFixed(2));
      }
    }
    const at = pointAt(path, dot.t);
    if (dot.root.hasAttribute("display")) dot.root.removeAttribute("display");
    dot.root.setAttribute("transform", `translate(${at.x.toFixed(1)} ${at.y.toFixed(1)})`);
    return true;
  }
}

function hash(text) {
  let value = 7;
  for (let index = 0; index < text.length; index += 1) value = (value * 31 + text.charCodeAt(index)) >>> 0;
  return value;
}
