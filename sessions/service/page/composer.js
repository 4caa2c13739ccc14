// Where one writes. Enter sends (on a touch screen it is a new line), Shift+Enter is a new line, Escape stops.

import { el } from "./dom.js";
import { settingsFields } from "./settings.js";

const touch = matchMedia("(pointer: coarse)");

/** `send(text)` is called with what was written; `stop()` to end the reply that is being said. */
export class Composer {
  #field = el("textarea", { id: "words", rows: "1", placeholder: "Say something…", "aria-describedby": "words-how" });
  #send = el("button", { class: "primary", id: "send" }, "Send");
  #stop = el("button", { type: "button", id: "stop", hidden: true }, "Stop");

  constructor(send, stop) {
    this.node = el("form", { class: "composer", "aria-label": "Your message", onsubmit: (event) => {
      event.preventDefault();
      this.#submit(send);
    } },
      el("label", { class: "unseen", for: "words" }, "Your message"),
      el("div", { class: "write" }, this.#field, this.#send, this.#stop),
      el("div", { class: "under" },
        settingsFields(),
        el("span", { class: "quiet how", id: "words-how" }, "Enter sends, Shift+Enter is a new line, Escape stops a reply"),
      ),
    );
    this.#stop.addEventListener("click", stop);
    enterSends(this.#field, () => this.#submit(send));
    this.#field.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
  }

  get text() {
    return this.#field.value;
  }

  set text(text) {
    this.#field.value = text;
  }

  focus() {
    if (!touch.matches) this.#field.focus(); // there a keyboard would come up over what is to be read
  }

  /** While a reply is said one can write on, and not send. */
  wait(replying, settling) {
    this.#send.hidden = replying;
    this.#stop.hidden = !replying;
    this.#stop.disabled = settling;
    this.#stop.textContent = settling ? "Stopping…" : "Stop";
  }

  #submit(send) {
    const text = this.text;
    if (text.trim() === "" || this.#send.hidden) return;
    this.text = "";
    send(text);
  }
}

export function enterSends(field, send) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
    event.preventDefault();
    send();
  });
}
