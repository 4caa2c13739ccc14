// The conversations that this page has opened, each once: one goes on while another is shown.

import { Talk } from "./talk.js";

const MOST = 20;
const open = new Map();

export function talkOf(id) {
  const talk = open.get(id) ?? new Talk(id);
  open.delete(id); // the one that was asked for last is the last to go
  open.set(id, talk);
  for (const [other, old] of open) {
    if (open.size <= MOST) break;
    if (old !== talk && old.phase === "idle" && old.unsaved === null) open.delete(other);
  }
  return talk;
}

export function close(id) {
  open.delete(id);
}
