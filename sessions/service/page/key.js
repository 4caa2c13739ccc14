// The API key, where the service has keys. It is kept for this tab, in sessionStorage, and nowhere else.

import { button, el } from "./dom.js";

const PLACE = "tenuto.key";
let asking = null;

export function key() {
  return sessionStorage.getItem(PLACE);
}

export function forget() {
  sessionStorage.removeItem(PLACE);
}

/** The way to another key is shown where there is one. */
export function reveal() {
  document.getElementById("key").hidden = key() === null;
}

/** Ask for a key; resolves to whether one was given. Who asks while it is asked for waits for the same answer. */
export function ask(why) {
  asking ??= shown(why).finally(() => {
    asking = null;
  });
  return asking;
}

function shown(why) {
  const field = el("input", {
    id: "key-field", type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "tnt_…",
  });
  const dialog = el("dialog", { class: "dialog", "aria-labelledby": "key-title" });
  const form = el("form", { method: "dialog" },
    el("h2", { id: "key-title" }, "An API key is needed"),
    el("p", { role: "alert" }, why),
    el("label", { for: "key-field" }, "API key"), field,
    el("p", { class: "quiet" }, "It stays in this tab, and is forgotten with it."),
    el("div", { class: "row" },
      el("button", { class: "primary", value: "use" }, "Use it"),
      button("Not now", () => dialog.close("")),
    ),
  );
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use" && field.value.trim() !== "";
      if (given) sessionStorage.setItem(PLACE, field.value.trim());
      reveal();
      dialog.remove();
      resolve(given);
    });
  });
}
