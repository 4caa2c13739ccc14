// The bar of a turn: what of its prompt was restored, what was read again, and what is new.

import { el, unseen } from "./dom.js";
import { ENDINGS, REASONS, count } from "./words.js";

const KINDS = [["restored", "restored"], ["recomputed", "recomputed"], ["fresh", "new"]];

/** Reasons of a conversation's first prompt: what was read for it was not read before. */
const FIRST = ["new", "prefix"];

/** The figures of a turn, from its `begun` event. */
export function figures(begun) {
  const { restored_tokens: restored, reason, detail } = begun.restored;
  const recomputed = FIRST.includes(reason) ? 0 : begun.restored.recomputed_tokens;
  return { restored, recomputed, fresh: Math.max(0, begun.prompt_tokens - restored - recomputed), reason, detail };
}

/** `turn` has what `figures` gives; `finish` says how its reply ended, if it has. Opened, it tells the reason. */
export function barOf(turn) {
  const shown = KINDS.filter(([kind]) => turn[kind] > 0);
  const why = [REASONS[turn.reason], turn.detail].filter(Boolean).join(" ");
  return el("details", { class: "told" },
    el("summary", {},
      el("span", { class: "bar", "aria-hidden": "true" }, ...shown.map(([kind]) => piece(kind, turn[kind]))),
      el("span", { class: "legend" },
        unseen("Of the prompt’s tokens: "),
        ...KINDS.map(([kind, name]) => el("span", { class: `count ${kind}` }, `${count(turn[kind])} ${name}`)),
        el("code", { class: "reason" }, turn.reason),
        ENDINGS[turn.finish] ? el("span", { class: "ending" }, ENDINGS[turn.finish]) : null,
      ),
    ),
    el("p", { class: "why" }, why || "Nothing more is told of it."),
  );
}

/** A piece whose width is its share of the bar. */
export function piece(kind, share) {
  const node = el("span", { class: kind });
  node.style.flexGrow = String(share); // by script: the policy of the page has no inline styles
  return node;
}
