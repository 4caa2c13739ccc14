// The list of conversations, flat or as a tree of forks. Arrow keys go from one to the next.

import { asRefused } from "./api.js";
import { button, el } from "./dom.js";
import { refusal } from "./notice.js";
import { treeOf } from "./tree.js";
import { ago, called, turns } from "./words.js";

const PLACE = "tenuto.shape";
/** Milliseconds that one does not type before it is looked for. */
const REST = 250;

export class ListView {
  #sessions;
  #lines = document.getElementById("lines");
  #as = { list: document.getElementById("as-list"), tree: document.getElementById("as-tree") };
  #shape = sessionStorage.getItem(PLACE) ?? "list";
  #current = null;
  #trouble = null;
  #typing = 0;

  constructor(sessions) {
    this.#sessions = sessions;
    sessions.addEventListener("change", () => this.#show());
    for (const [shape, switched] of Object.entries(this.#as)) {
      switched.addEventListener("click", () => this.#take(shape));
    }
    document.getElementById("containing").addEventListener("input", (event) => {
      clearTimeout(this.#typing);
      this.#typing = setTimeout(() => this.read(event.target.value), REST);
    });
    this.#lines.addEventListener("keydown", (event) => this.#walk(event));
    this.#take(this.#shape);
  }

  /** Read the list from its start. */
  async read(containing = this.#sessions.containing) {
    await this.#trying(() => this.#sessions.find(containing));
  }

  /** Mark the one that is shown beside the list. */
  mark(id) {
    this.#current = id;
    for (const link of this.#lines.querySelectorAll("a")) mark(link, id);
  }

  #take(shape) {
    this.#shape = shape;
    sessionStorage.setItem(PLACE, shape);
    for (const [each, switched] of Object.entries(this.#as)) switched.setAttribute("aria-pressed", String(each === shape));
    this.#show();
  }

  async #trying(verb) {
    this.#trouble = null;
    try {
      await verb();
    } catch (error) {
      this.#trouble = { refused: asRefused(error), verb };
      this.#show();
    }
  }

  /** Read on; who does it by keyboard finds itself at the first that came. */
  async #older() {
    const number = this.#sessions.lines.size;
    await this.#trying(() => this.#sessions.more());
    if (document.activeElement === document.body) this.#lines.querySelectorAll("a, button")[number]?.focus();
  }

  #show() {
    const focused = document.activeElement?.closest("#lines a")?.dataset.id;
    const lines = [...this.#sessions.lines.values()];
    const shown = this.#shape === "tree" ? this.#branches(treeOf(lines)) : el("ul", {}, ...lines.map((line) => el("li", {}, this.#link(line))));
    this.#lines.replaceChildren(shown, ...this.#end(lines.length));
    if (focused) this.#lines.querySelector(`a[data-id="${focused}"]`)?.focus();
  }

  #branches(nodes) {
    return el("ul", {}, ...nodes.map(({ line, forks }) =>
      el("li", {}, this.#link(line), forks.length > 0 ? this.#branches(forks) : null)));
  }

  #link(line) {
    const facts = [line.name, turns(line.turns), ago(line.updated)].filter(Boolean).join(" · ");
    const link = el("a", { class: "line", href: `#/s/${line.id}`, "data-id": line.id },
      el("span", { class: "called", dir: "auto" }, called(line)),
      el("span", { class: "facts" }, line.parent ? el("span", { class: "fork" }, "fork") : null, facts),
    );
    mark(link, this.#current);
    return link;
  }

  #end(number) {
    const { after, reading, containing } = this.#sessions;
    if (this.#trouble) {
      const { refused, verb } = this.#trouble;
      return [refusal(refused, () => this.#trying(verb), null)];
    }
    if (reading || after === undefined) return [el("p", { class: "quiet end" }, "Reading…")];
    if (after !== null) {
      const text = number === 0 ? "None so far. Look further back" : "Show older";
      return [button(text, () => this.#older(), { class: "end", id: "older" })];
    }
    if (number > 0) return [];
    return [el("p", { class: "quiet end" }, containing ? "None has that in its name or title." : "There is no conversation yet.")];
  }

  #walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    const links = [...this.#lines.querySelectorAll("a")];
    const next = links[links.indexOf(document.activeElement) + step];
    if (next === undefined) return;
    event.preventDefault();
    next.focus();
  }
}

function mark(link, id) {
  if (link.dataset.id === id) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
}
