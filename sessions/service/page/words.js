// Figures and codes in words.

const COUNT = new Intl.NumberFormat("en");
const AGO = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const UNITS = [["year", 31536000], ["month", 2592000], ["day", 86400], ["hour", 3600], ["minute", 60]];

/** Why so much was restored, and not more. A reason that is not here is shown by its name alone. */
export const REASONS = {
  exact: "Everything came back, bit for bit.",
  compatible: "Everything came back; another build made it, and a canary agreed.",
  prefix: "Shared with a conversation that begins alike.",
  new: "There was nothing to restore yet.",
  expired: "Its rows had been given up by age or budget, and were read again.",
  "no-checkpoint": "The model cannot go on from exactly there; the rest was read again.",
  "template-diverged": "The chat template no longer renders the past alike.",
  edited: "The conversation was cut back.",
  fingerprint: "Another model or configuration made it; it was read again.",
  corrupt: "Stored bytes were damaged, and were read again.",
  missing: "Stored bytes were gone, and were read again.",
  "slower-than-recompute": "Reading again was quicker than restoring.",
};

/** How a reply ended, where that is worth a word. */
export const ENDINGS = {
  length: "cut at the longest reply",
  context: "cut: the context is full",
  cancelled: "stopped",
};

export function count(number) {
  return COUNT.format(number);
}

export function tokens(number) {
  return `${count(number)} ${number === 1 ? "token" : "tokens"}`;
}

export function turns(number) {
  return `${count(number)} ${number === 1 ? "turn" : "turns"}`;
}

export function size(nbytes) {
  if (nbytes < 1000) return `${nbytes} B`;
  let value = nbytes;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    value /= 1000;
    if (value < 999.5 || unit === "TB") return `${value.toFixed(value < 10 ? 1 : 0)} ${unit}`;
  }
}

/** `seconds` since the epoch, as one speaks of it now. */
export function ago(seconds) {
  const age = seconds - Date.now() / 1000;
  for (const [unit, long] of UNITS) {
    if (Math.abs(age) >= long) return AGO.format(Math.trunc(age / long), unit);
  }
  return "just now";
}

/** A length of time, in the largest unit that it has some of. */
export function span(seconds) {
  const [unit, long] = UNITS.find(([, each]) => seconds >= each) ?? ["second", 1];
  const number = Math.round((seconds / long) * 10) / 10;
  return `${COUNT.format(number)} ${unit}${number === 1 ? "" : "s"}`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString();
}

/** What a session is called. */
export function called(session) {
  return session.title || session.name || "Untitled";
}
