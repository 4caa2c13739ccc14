// The service, as the page asks it: one function for a request, and one class for every refusal.

import { ask, forget, key } from "./key.js";

/** What was answered instead of what was asked. Status 0: nothing was answered at all. */
export class Refused extends Error {
  constructor(status, error, retryAfter = null) {
    super(error.message);
    this.status = status;
    this.code = error.code;
    this.details = error.details ?? {};
    this.retryAfter = retryAfter;
  }
}

const UNREACHABLE = { code: "unreachable", message: "The service does not answer. It may have ended, or the network is away." };

/**
 * The answer, whatever its body is. `json` is sent as the body; 304 is an answer and no refusal.
 * Throws Refused, and what `signal` is aborted with.
 */
export async function request(method, path, { json, body, headers = {}, signal } = {}) {
  for (;;) {
    const used = key();
    const answer = await sent(method, path, { json, body, headers, signal });
    if (answer.ok || answer.status === 304) return answer;
    const refused = await refusal(answer);
    if (refused.status !== 401) throw refused;
    if (key() !== used) continue; // one was given meanwhile
    const why = used === null ? "This service answers only those who have one." : "That key is nobody’s here.";
    forget();
    if (!(await ask(why))) throw refused;
  }
}

/** The JSON of an answer, and the ETag that it came with. */
export async function asked(method, path, options) {
  const answer = await request(method, path, options);
  try {
    return { data: answer.status === 204 ? null : await answer.json(), etag: answer.headers.get("etag") };
  } catch {
    throw new Refused(0, UNREACHABLE); // it broke off
  }
}

export function sessionPath(id, ...rest) {
  return ["/v1/sessions", encodeURIComponent(id), ...rest].join("/");
}

/** What to tell of anything that was thrown. */
export function asRefused(error) {
  if (error instanceof Refused) return error;
  return new Refused(0, { code: "page", message: `The page failed: ${error.message}` });
}

async function sent(method, path, { json, body, headers, signal }) {
  const all = new Headers(headers);
  if (key()) all.set("authorization", `Bearer ${key()}`);
  if (json !== undefined) all.set("content-type", "application/json");
  try {
    return await fetch(path, {
      method, headers: all, signal, cache: "no-store", credentials: "omit",
      body: json === undefined ? body : JSON.stringify(json),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, UNREACHABLE);
  }
}

async function refusal(answer) {
  const wait = Number.parseInt(answer.headers.get("retry-after") ?? "", 10);
  let error = { code: "refused", message: `The answer was ${answer.status}.` };
  try {
    error = (await answer.json()).error ?? error;
  } catch {
    // a proxy's answer: it has a status and no reason
  }
  return new Refused(answer.status, error, Number.isNaN(wait) ? null : wait);
}
