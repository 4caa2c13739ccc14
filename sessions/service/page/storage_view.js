// What is stored: by what it is for, by tier and by age, as far as the service tells; and what gc would take.

import { asRefused, asked } from "./api.js";
import { piece } from "./bar.js";
import { button, el } from "./dom.js";
import { refusal } from "./notice.js";
import { count, size, span } from "./words.js";

const PURPOSES = [
  ["rows", "rows_bytes", "Rows", "what conversations go on from without being read again"],
  ["manifests", "manifest_bytes", "Manifests", "texts, token ids, and where the rows are"],
  ["superseded", "superseded_bytes", "Superseded", "no conversation needs it; gc takes it after its grace"],
  ["index", "index_bytes", "Index", "what finds the others"],
];

export class StorageView {
  #sessions;
  #notices = el("div", { class: "notices" });
  #shown = el("div", { class: "storage" });
  #plan = el("div", { class: "plan", role: "status" });

  constructor(sessions) {
    this.#sessions = sessions;
    this.nodes = [
      el("header", { class: "head" },
        el("a", { class: "back", href: "#/" }, "‹ All"),
        el("div", { class: "title" }, el("h1", { tabindex: "-1" }, "Storage"), el("p", { class: "facts quiet" }, "Every byte that is kept of your conversations")),
        el("div", { class: "row" }, button("Look again", () => this.open())),
      ),
      this.#notices,
      el("div", { class: "turns" }, this.#shown),
    ];
  }

  async open() {
    document.title = "Storage · tenuto";
    this.#notices.replaceChildren();
    try {
      const { data } = await asked("GET", "/v1/storage");
      this.#show(data);
    } catch (error) {
      this.#notices.replaceChildren(refusal(asRefused(error), () => this.open(), null));
    }
  }

  close() {}

  look() {}

  #show(storage) {
    this.#shown.replaceChildren(
      el("p", { class: "total" }, el("b", {}, size(storage.total_bytes)), storage.tenant ? ` of tenant ${storage.tenant}` : ""),
      share(PURPOSES.map(([kind, field]) => [kind, storage[field]])),
      table("By purpose", PURPOSES.map(([kind, field, name, why]) => [kind, name, size(storage[field]), why])),
      ...parts("By tier", (storage.tiers ?? []).map(tierRow)),
      ...parts("By age", (storage.ages ?? []).map(ageRow)),
      ...kept(storage.kept),
      ...limits(storage),
      el("section", {},
        el("h2", {}, "Garbage collection"),
        el("p", { class: "quiet" }, "What gc would do now, as the service’s policy says it. Nothing is deleted here."),
        el("div", { class: "row" }, button("What would gc take?", () => this.#ask(), { id: "dry-run" })),
        this.#plan,
      ),
    );
    this.#plan.replaceChildren();
  }

  async #ask() {
    this.#plan.replaceChildren(el("p", { class: "quiet" }, "Looking…"));
    try {
      const { data } = await asked("GET", "/v1/storage/gc");
      this.#plan.replaceChildren(
        el("p", {}, `It would free ${count(data.num_blobs)} ${data.num_blobs === 1 ? "blob" : "blobs"}, ${size(data.nbytes)}.`),
        ...this.#those("Conversations that would be deleted", data.expired),
        ...this.#those("Conversations that would give up their rows, and be read again", data.released),
      );
    } catch (error) {
      this.#plan.replaceChildren(refusal(asRefused(error), () => this.#ask(), null));
    }
  }

  #those(title, ids) {
    if (ids.length === 0) return [];
    return [el("h3", {}, `${title}: ${count(ids.length)}`),
      el("ul", {}, ...ids.map((id) => el("li", {}, el("a", { href: `#/s/${id}` }, this.#sessions.lines.get(id)?.title || id))))];
  }
}

function share(parts) {
  const some = parts.filter(([, nbytes]) => nbytes > 0);
  return el("div", { class: "bar wide", "aria-hidden": "true" }, ...some.map(([kind, nbytes]) => piece(kind, nbytes)));
}

function table(title, rows) {
  return el("section", {}, el("h2", {}, title),
    el("table", {}, el("tbody", {}, ...rows.map(([kind, name, amount, why]) => el("tr", {},
      el("th", { scope: "row" }, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), name),
      el("td", { class: "amount" }, amount), el("td", { class: "quiet" }, why))))));
}

/** A service that tells nothing of it has no such part of the view. */
function parts(title, rows) {
  return rows.length === 0 ? [] : [table(title, rows)];
}

function tierRow({ kind, nbytes, budget_bytes: budget }, number) {
  return [`step-${number % 4}`, kind, size(nbytes), budget ? `of at most ${size(budget)}` : ""];
}

function ageRow({ below_seconds: below, num_blobs: blobs, nbytes }, number) {
  const age = below === null ? "older" : `less than ${span(below)}`;
  return [`step-${number % 4}`, age, size(nbytes), `${count(blobs)} ${blobs === 1 ? "blob" : "blobs"}`];
}

function limits(storage) {
  const told = [
    ["quota_bytes", (most) => `At most ${size(most)} may be stored.`],
    ["budget_bytes", (most) => `Beyond ${size(most)} the rows that were used least lately go.`],
    ["rows_ttl_seconds", (age) => `Rows are kept ${span(age)} after a conversation was last saved.`],
    ["session_ttl_seconds", (age) => `Conversations are kept ${span(age)} after they were last saved.`],
  ].filter(([field]) => typeof storage[field] === "number");
  if (told.length === 0) return [];
  return [el("section", {}, el("h2", {}, "Limits"), el("ul", {}, ...told.map(([field, tell]) => el("li", {}, tell(storage[field])))))];
}

function kept(names) {
  if (names.length === 0) return [];
  return [el("section", {}, el("h2", {}, "Kept turns"), el("p", { class: "quiet" }, "gc spares these."),
    el("ul", { class: "names" }, ...names.map((name) => el("li", {}, name))))];
}
