// Elements made of names and texts. Nothing here, or anywhere on the page, turns a text into markup.

/** A new element. Attributes that are null or false are left out; `onclick` and the like are listeners. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}

/** A text for screen readers alone. */
export function unseen(text) {
  return el("span", { class: "unseen" }, text);
}

/** Tell a screen reader what happened, without moving it. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}
