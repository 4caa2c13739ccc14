// An open conversation: what is stored of it, and the turn that is being said.
//
// It goes on while another one is shown. Every change is told by an event: "change" when messages or the phase
// are others, "piece" when the reply has grown.

import { Refused, asRefused, asked, request, sessionPath } from "./api.js";
import { figures } from "./bar.js";
import { events } from "./events.js";
import { see } from "./seen.js";

/** How often, and how long in all, it is asked what was kept of a reply that was cut off (milliseconds). */
const PAUSE = 250;
const PATIENCE = 10_000;
const UNTOLD = { code: "untold", message: "The service did not tell in time what it kept of the reply." };

export class Talk extends EventTarget {
  /** What the service says of it; null until it was asked. */
  session = null;
  etag = null;
  /** "idle", "replying", or "settling": the reply was cut off, and what was kept is not known yet. */
  phase = "idle";
  /** The turn that is being said: `{asked, text, told}`; `asked` is null where the reply is said anew. */
  turn = null;
  /** What went wrong, and what can be done about it: `{refused, again}`; null: nothing did. */
  trouble = null;
  /** Words for the composer that were not taken. */
  draft = "";
  /** The last turn, where the service could not store it: its messages, and why. */
  unsaved = null;
  /** Whether it is known to have moved on elsewhere. */
  stale = false;

  #leaving = null;

  constructor(id) {
    super();
    this.id = id;
  }

  get messages() {
    return this.unsaved?.messages ?? this.session?.messages ?? [];
  }

  /** Ask the service how it stands. Throws Refused. */
  async load() {
    const { data, etag } = await asked("GET", sessionPath(this.id));
    this.#adopt(data, etag);
  }

  /** It was made just now, and is as that was answered. */
  begin(session, etag) {
    this.#adopt(session, etag);
  }

  /** Whether it moved on elsewhere is looked at, and nothing is shown but that. */
  async look() {
    if (this.phase !== "idle" || this.session === null || this.stale) return;
    const known = this.etag;
    const answer = await request("GET", sessionPath(this.id), { headers: { "if-none-match": known } });
    if (answer.status !== 304 && this.phase === "idle" && this.etag === known && !this.unsaved) {
      this.stale = true;
      this.#changed();
    }
  }

  say(text, settings) {
    const json = { messages: [{ role: "user", content: text }], ...settings };
    return this.#reply("messages", json, this.messages.length, text);
  }

  edit(text, settings) {
    const at = this.messages.findLastIndex((message) => message.role === "user");
    return this.#reply("edit", { content: text, ...settings }, at, text);
  }

  regenerate(settings) {
    return this.#reply("regenerate", settings, this.messages.length - 1, null);
  }

  /** End the reply that is being said. What was said of it is kept. */
  stop() {
    this.#leaving?.abort();
  }

  /** Take back the last turns; resolves to what was restored, or null where it was refused. */
  async rewind(turns) {
    const done = await this.#change("POST", "rewind", { turns });
    return done?.restored ?? null;
  }

  async rename(name) {
    return this.#change("PATCH", null, { name });
  }

  /** Try again to store a turn that could not be. */
  async save() {
    return this.#change("POST", "save", undefined, {});
  }

  /** A new session with the same past but for the last turns. Throws Refused. */
  async fork(turnsBack) {
    const { data } = await asked("POST", sessionPath(this.id, "fork"), { json: { turns_back: turnsBack }, headers: this.#expected() });
    return data;
  }

  /** Throws Refused. */
  async remove() {
    await request("DELETE", sessionPath(this.id), { headers: this.#expected() });
  }

  dismiss() {
    this.trouble = null;
    this.#changed();
  }

  // --- inside ---------------------------------------------------------------------------------

  #expected() {
    return this.etag === null ? {} : { "if-match": this.etag };
  }

  #adopt(session, etag) {
    this.session = session;
    this.etag = etag;
    this.unsaved = null;
    this.stale = false;
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }

  #failed(refused, again) {
    if (refused.status === 412) this.stale = true;
    this.trouble = refused.status === 412 ? null : { refused, again };
  }

  /** A change of what is stored, without a word said. The answer's data, or null where it was refused. */
  async #change(method, verb, json, headers = this.#expected()) {
    const path = verb === null ? sessionPath(this.id) : sessionPath(this.id, verb);
    this.trouble = null;
    try {
      const { data, etag } = await asked(method, path, { json, headers });
      this.#adopt(data.session ?? data, etag);
      return data;
    } catch (error) {
      this.#failed(asRefused(error), () => this.#change(method, verb, json, headers));
      this.#changed();
      return null;
    }
  }

  /** One turn: its reply is message number `from` (after `text`, if that is there). */
  async #reply(verb, json, from, text) {
    if (this.phase !== "idle") return;
    const before = this.messages.slice(0, from);
    this.phase = "replying";
    this.trouble = null;
    this.turn = { from, asked: text, text: "", told: null };
    const leaving = new AbortController();
    this.#leaving = leaving;
    this.#changed();
    try {
      const body = { ...json, stream: true };
      const answer = await request("POST", sessionPath(this.id, verb), { json: body, headers: this.#expected(), signal: leaving.signal });
      const ended = await this.#hear(answer.body);
      await this.#end(before, ended);
    } catch (error) {
      await this.#broke(error, leaving.signal.aborted, verb === "messages" ? null : () => this.#reply(verb, json, from, text));
    } finally {
      this.phase = "idle";
      this.turn = null;
      this.#leaving = null;
      this.#changed();
    }
  }

  /** The `ended` event of a stream; pieces are told as they come. Throws Refused where it fails or breaks off. */
  async #hear(body) {
    try {
      for await (const { name, data } of events(body)) {
        if (name === "begun") {
          this.turn.told = figures(data);
          this.#changed();
        } else if (name === "piece") {
          this.turn.text += data.text;
          this.dispatchEvent(new CustomEvent("piece", { detail: data.text }));
        } else if (name === "ended") {
          return data;
        } else if (name === "error") {
          throw new Refused(0, data.error);
        }
      }
    } catch (error) {
      if (error instanceof Refused || error.name === "AbortError") throw error;
    }
    throw new Refused(0, { code: "broke_off", message: "The connection broke off before the reply had ended." });
  }

  async #end(before, ended) {
    const said = this.turn.asked === null ? [] : [{ role: "user", content: this.turn.asked }];
    const messages = [...before, ...said, { role: "assistant", content: ended.reply.content }];
    see(this.id, messages.length - 1, ended.reply.content, { ...this.turn.told, finish: ended.reply.finish });
    if (ended.save_error !== null) {
      this.unsaved = { messages, error: ended.save_error };
      return;
    }
    // The reply is shown as it was heard; figures that only the stored turn has come with the next answer.
    this.session = { ...this.session, messages };
    this.etag = `"${ended.etag}"`;
    this.unsaved = null;
    try {
      const { data, etag } = await asked("GET", sessionPath(this.id));
      if (etag === this.etag) this.session = data;
      else this.stale = true;
    } catch (error) {
      this.#failed(asRefused(error), null);
    }
  }

  /**
   * A reply without its end: refused before it began, failed, broken off, or stopped. What was to be said, and was
   * not taken, goes back to the composer, unless there is an `again`.
   */
  async #broke(error, stopped, again) {
    const { asked: text, told, text: heard } = this.turn;
    if (told === null && !stopped) {
      this.draft = again === null ? text : "";
      this.#failed(asRefused(error), again);
      return;
    }
    this.phase = "settling";
    this.#changed();
    const kept = await this.#settle();
    if (kept && told !== null) this.#recognize(heard, told, stopped);
    if (!kept) this.draft = again === null ? text : "";
    if (!stopped) this.trouble = { refused: asRefused(error), again: kept ? null : again };
    else if (!kept) this.trouble = { refused: new Refused(0, UNTOLD), again };
  }

  /** Wait until the service has stored what there was of the reply; whether it has in time. */
  async #settle() {
    const until = Date.now() + PATIENCE;
    while (Date.now() < until) {
      try {
        const answer = await request("GET", sessionPath(this.id), { headers: { "if-none-match": this.etag } });
        if (answer.status !== 304) {
          this.#adopt(await answer.json(), answer.headers.get("etag"));
          return true;
        }
      } catch {
        // it may be back before the patience ends
      }
      await new Promise((resolve) => { setTimeout(resolve, PAUSE); });
    }
    return false;
  }

  /** Give the figures of a cut reply to what was stored of it. More may be stored than was heard. */
  #recognize(heard, told, stopped) {
    const last = this.messages.at(-1);
    if (last?.role === "assistant" && last.content.startsWith(heard)) {
      see(this.id, this.messages.length - 1, last.content, { ...told, finish: stopped ? "cancelled" : null });
    }
  }
}
