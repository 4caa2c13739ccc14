// What turns told when they were said: the session itself keeps its texts, and not what each turn restored.
// Figures alone are kept, for this tab, and none of what was said.

const MOST = 200;

function place(session) {
  return `tenuto.turns.${session}`;
}

/** The figures of the reply that is message `index`, if this tab heard that very reply; else null. */
export function seen(session, index, text) {
  const found = all(session)[index];
  return found && found.sum === sum(text) ? found : null;
}

export function see(session, index, text, figures) {
  const turns = Object.entries(all(session)).filter(([at]) => Number(at) < index).slice(-MOST);
  const kept = { ...Object.fromEntries(turns), [index]: { ...figures, sum: sum(text) } };
  keep(session, JSON.stringify(kept));
}

/** A fork has the past of its origin, and what was told of it. */
export function inherit(fork, origin) {
  const told = sessionStorage.getItem(place(origin));
  if (told !== null) keep(fork, told);
}

function keep(session, told) {
  try {
    sessionStorage.setItem(place(session), told);
  } catch {
    // no room: bars of older turns are all that is lost
  }
}

function all(session) {
  try {
    return JSON.parse(sessionStorage.getItem(place(session))) ?? {};
  } catch {
    return {};
  }
}

/** FNV-1a: whether it is the same text, without keeping it. */
function sum(text) {
  let value = 0x811c9dc5;
  for (let at = 0; at < text.length; at += 1) value = Math.imul(value ^ text.charCodeAt(at), 0x01000193) >>> 0;
  return value;
}
