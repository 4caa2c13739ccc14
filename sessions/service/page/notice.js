// What went wrong, in the service's own words, and what can be done about it.

import { button, el } from "./dom.js";
import { clock } from "./words.js";

/** A notice of a refusal. `again` tries once more what was refused; null: there is no such thing. */
export function refusal(refused, again, dismiss) {
  const code = refused.status === 0 ? refused.code : `${refused.status} ${refused.code}`;
  return notice("alert", [el("span", {}, refused.message), el("code", {}, code), later(refused)], [
    again ? button("Try again", again) : null,
    dismiss ? button("Dismiss", dismiss) : null,
  ]);
}

/** `role` is "alert" for what went wrong and "status" for what is good to know. */
export function notice(role, said, actions) {
  return el("div", { class: `notice ${role}`, role },
    el("p", {}, ...said.filter((each) => each !== null)),
    el("div", { class: "row" }, ...actions),
  );
}

function later({ details, retryAfter }) {
  if (details.until) return el("span", {}, `Held by ${details.holder} until ${clock(details.until)}.`);
  if (retryAfter !== null) return el("span", {}, `Try again in ${retryAfter} s.`);
  return null;
}
