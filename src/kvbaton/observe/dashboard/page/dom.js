// Making and changing elements. Law: text goes in as text; there is no way to pass markup, and none is ever parsed.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.setAttribute("class", value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** An HTML element with attributes and children; strings become text. */
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Set a text, if it is another one than before. */
export function setText(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

/** Set an attribute, if it is another one than before; null removes it. */
export function setAttr(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Elements for items, kept by key: made once, changed in place, removed when their item is gone. Order follows items. */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.known = new Map();
  }

  update(items, keyOf, change) {
    const gone = new Set(this.known.keys());
    let before = null; // the element that the next one stands after
    for (const item of items) {
      const key = keyOf(item);
      let entry = this.known.get(key);
      if (entry === undefined) {
        entry = this.make(item);
        this.known.set(key, entry);
      }
      gone.delete(key);
      // Only what stands in the wrong place is moved: moving takes the keyboard's focus away
      const place = before === null ? this.parent.firstChild : before.nextSibling;
      if (entry.root !== place && !this.comesSoon(place, entry.root, gone)) this.parent.insertBefore(entry.root, place);
      before = entry.root;
      change(entry, item);
    }
    for (const key of gone) {
      this.known.get(key).root.remove();
      this.known.delete(key);
    }
  }

  /** Whether only elements that are about to be removed stand between. */
  comesSoon(place, root, gone) {
    const leaving = new Set([...gone].map((key) => this.known.get(key).root));
    while (place !== null && place !== root && leaving.has(place)) place = place.nextSibling;
    return place === root;
  }
}

/** A button that copies a text. */
export function copyButton(text, what) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(text);
    setText(button, copied ? "Copied" : "Select and press Ctrl+C");
    setTimeout(() => setText(button, "Copy"), 1600);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // only on loopback and behind TLS
    return true;
  } catch {
    const field = h("textarea", { class: "unseen", "aria-hidden": "true" });
    field.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}
