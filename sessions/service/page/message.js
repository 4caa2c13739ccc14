// One message: its text, shortened where it is very long.

import { button, el, unseen } from "./dom.js";
import { count } from "./words.js";

const WHO = { user: "You", assistant: "Reply", system: "System" };
const LONG = 4000;
const LINES = 40;

/** `text` is what goes on growing, if it does: a text node. */
export function messageOf(role, text, after = []) {
  const words = el("div", { class: "words", dir: "auto" }, text);
  const node = el("section", { class: `message ${role}` }, el("h3", { class: "who" }, WHO[role] ?? role), words);
  if (typeof text === "string" && isLong(text)) shorten(node, words, text);
  node.append(...after);
  return node;
}

function isLong(text) {
  return text.length > LONG || text.split("\n", LINES + 1).length > LINES;
}

function shorten(node, words, text) {
  words.classList.add("short");
  const all = `Show all ${count(text.length)} characters`;
  const more = button(all, () => {
    const short = words.classList.toggle("short");
    more.setAttribute("aria-expanded", String(!short));
    more.textContent = short ? all : "Show less";
  }, { class: "more", "aria-expanded": "false" });
  node.append(more);
}

/** What stands for a reply of which this tab does not know what was restored for it. */
export function untold(message) {
  const length = message.stop - message.start;
  return el("p", { class: "told untold" },
    unseen("Restored for it: "), "said before this tab looked",
    length > 0 ? `, ${count(length)} tokens` : "");
}
