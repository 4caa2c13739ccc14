// Questions that stop the page until they are answered. Escape is the answer that changes nothing.

import { button, el } from "./dom.js";

const NAME = "[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}";

/** Whether the user agrees. */
export async function confirmed(title, why, verb) {
  const answer = await asked(title, [el("p", {}, why)], verb);
  return answer !== null;
}

/** The name that was chosen, null for none, undefined where nothing is to change. */
export async function named(now) {
  const field = el("input", { id: "name", pattern: NAME, maxlength: "64", autocomplete: "off", spellcheck: "false" });
  field.value = now ?? "";
  const hint = "Letters, digits, . _ and -; empty for none.";
  const answer = await asked("Rename", [el("label", { for: "name" }, "Name"), field, el("p", { class: "quiet" }, hint)], "Rename");
  return answer === null ? undefined : field.value || null;
}

function asked(title, said, verb) {
  const dialog = el("dialog", { class: "dialog", "aria-labelledby": "dialog-title" });
  dialog.append(el("form", { method: "dialog" },
    el("h2", { id: "dialog-title" }, title), ...said,
    el("div", { class: "row" }, el("button", { class: "primary", value: "yes" }, verb), button("Cancel", () => dialog.close(""))),
  ));
  document.body.append(dialog);
  const before = document.activeElement;
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      before?.focus();
      resolve(dialog.returnValue === "yes" ? true : null);
    });
  });
}
