// The list of conversations, as far as it was read: page by page, the newest first.

import { asked } from "./api.js";

const PAGE = 50;

export class Sessions extends EventTarget {
  /** Lines by session id, in the order of the list. */
  lines = new Map();
  /** What to ask for to read on; null: that was all; undefined: nothing was read yet. */
  after = undefined;
  containing = "";
  reading = false;
  #search = 0;

  /** From the start, those whose name or title contains a text. Throws Refused. */
  async find(containing) {
    this.containing = containing;
    this.#search += 1;
    this.after = undefined;
    this.reading = false;
    await this.more(new Map());
  }

  /** The next page, after those in `lines`. Throws Refused. */
  async more(lines = this.lines) {
    if (this.reading || this.after === null) return;
    const search = this.#search;
    this.reading = true;
    this.#changed();
    try {
      const query = new URLSearchParams({ limit: String(PAGE), containing: this.containing });
      if (this.after !== undefined) query.set("after", this.after);
      const { data } = await asked("GET", `/v1/sessions?${query}`);
      if (search !== this.#search) return; // another text was asked for meanwhile
      this.lines = new Map([...lines, ...data.data.map((line) => [line.id, line])]);
      this.after = data.after;
    } finally {
      if (search === this.#search) this.reading = false;
      this.#changed();
    }
  }

  /** Read again what is newest; what was read beyond that stays as it was. Throws Refused. */
  async refresh() {
    if (this.reading || this.after === undefined) return;
    const search = this.#search;
    const query = new URLSearchParams({ limit: String(PAGE), containing: this.containing });
    const { data: page } = await asked("GET", `/v1/sessions?${query}`);
    if (search !== this.#search || this.reading) return;
    const older = page.after === null ? [] : [...this.lines.values()].filter((line) => line.id < page.after);
    if (older.length === 0) this.after = page.after;
    this.lines = new Map([...page.data, ...older].map((line) => [line.id, line]));
    this.#changed();
  }

  /** What is known better of one. A new one stands where the list has it, if the list was read that far. */
  put(session) {
    const { messages, sampler, ...line } = session;
    const old = this.lines.get(line.id);
    if (old ? JSON.stringify(old) === JSON.stringify(line) : !this.#reaches(line)) return;
    const lines = [...this.lines.set(line.id, line).values()];
    this.lines = new Map(lines.sort((a, b) => (a.id < b.id ? 1 : -1)).map((each) => [each.id, each]));
    this.#changed();
  }

  drop(id) {
    this.lines.delete(id);
    this.#changed();
  }

  #reaches(line) {
    const text = `${line.name ?? ""}\n${line.title}`.toLowerCase();
    const isRead = this.after === null || [...this.lines.keys()].some((id) => id < line.id);
    return this.after !== undefined && isRead && text.includes(this.containing.toLowerCase());
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}
