// How replies are to be said: of this page, for all of its conversations, as long as the tab is open.

import { el } from "./dom.js";

const PLACE = "tenuto.settings";
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "as the session has it" },
  { name: "max_tokens", label: "Longest reply, in tokens", min: 1, max: 1_000_000, step: 1, hint: "512" },
];
const LONGEST = 512;
/** What a conversation that is begun here has, so that a reply that is said anew is another one. */
const TEMPERATURE = 0.7;

function given() {
  try {
    return JSON.parse(sessionStorage.getItem(PLACE)) ?? {};
  } catch {
    return {};
  }
}

/** The fields of a turn's body that say how to reply. */
export function settings() {
  const { temperature, max_tokens: longest } = given();
  return { max_tokens: longest ?? LONGEST, ...(temperature === undefined ? {} : { sampler: { temperature } }) };
}

/** The same for a reply that is said anew: by another seed, and not greedily, or it would be the same reply. */
export function otherwise(session) {
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const temperature = given().temperature ?? (session.sampler.temperature || TEMPERATURE);
  return { ...settings(), sampler: { temperature, seed } };
}

/** The sampler of a conversation that is begun here. */
export function sampler() {
  return { temperature: given().temperature ?? TEMPERATURE };
}

export function settingsFields() {
  return el("details", { class: "settings" },
    el("summary", {}, "Reply settings"),
    el("div", { class: "fields" }, ...FIELDS.map(field)),
  );
}

function field({ name, label, min, max, step, hint }) {
  const input = el("input", {
    type: "number", inputmode: "decimal", min: String(min), max: String(max), step: String(step), placeholder: hint,
    id: `setting-${name}`,
    onchange: () => {
      const { [name]: _, ...rest } = given();
      const value = input.valueAsNumber;
      const kept = Number.isNaN(value) || !input.checkValidity() ? rest : { ...rest, [name]: value };
      sessionStorage.setItem(PLACE, JSON.stringify(kept));
    },
  });
  const value = given()[name];
  if (value !== undefined) input.value = String(value);
  return el("label", {}, label, input);
}
