// A new conversation: it is begun with the first thing that is said.

import { asRefused, asked } from "./api.js";
import { Composer } from "./composer.js";
import { el } from "./dom.js";
import { refusal } from "./notice.js";
import { sampler, settings } from "./settings.js";
import { talkOf } from "./talks.js";

export class NewView {
  #shell;
  #notices = el("div", { class: "notices" });
  #system = el("textarea", { id: "system", rows: "2", placeholder: "Be brief." });
  #name = el("input", { id: "new-name", pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}", maxlength: "64", autocomplete: "off", spellcheck: "false" });
  #composer = new Composer((text) => this.#begin(text), () => {});

  constructor(shell) {
    this.#shell = shell;
    this.nodes = [
      el("header", { class: "head" },
        el("a", { class: "back", href: "#/" }, "‹ All"),
        el("div", { class: "title" }, el("h1", {}, "A new conversation"),
          el("p", { class: "facts quiet" }, "It is kept, and goes on whenever you like, without being read again.")),
      ),
      this.#notices,
      el("div", { class: "turns new-talk" },
        el("details", {}, el("summary", {}, "A system message, and a name"),
          el("div", { class: "fields wide" },
            el("label", {}, "System message", this.#system),
            el("label", {}, "Name: letters, digits, . _ and -", this.#name))),
      ),
      this.#composer.node,
    ];
  }

  async open() {
    document.title = "tenuto";
    this.#composer.focus();
  }

  close() {}

  look() {}

  async #begin(text) {
    if (!this.#name.reportValidity()) {
      this.#composer.text = text;
      return;
    }
    const json = { name: this.#name.value || null, system: this.#system.value || null, sampler: sampler() };
    this.#notices.replaceChildren();
    this.#composer.wait(true, false);
    try {
      const { data, etag } = await asked("POST", "/v1/sessions", { json });
      const talk = talkOf(data.id);
      talk.begin(data, etag);
      talk.say(text, settings());
      this.#shell.changed(data);
      this.#shell.go(`#/s/${data.id}`);
    } catch (error) {
      this.#composer.wait(false, false);
      this.#composer.text = text;
      this.#notices.replaceChildren(refusal(asRefused(error), null, null));
    }
  }
}
