// A conversation on the screen: its head, its turns, and where one writes.

import { asRefused } from "./api.js";
import { download } from "./archive.js";
import { barOf } from "./bar.js";
import { Composer, enterSends } from "./composer.js";
import { confirmed, named } from "./dialogs.js";
import { announce, button, el } from "./dom.js";
import { messageOf, untold } from "./message.js";
import { notice, refusal } from "./notice.js";
import { inherit, seen } from "./seen.js";
import { otherwise, settings } from "./settings.js";
import { talkOf } from "./talks.js";
import { asks, turnsOf } from "./turns.js";
import { called, count, tokens, turns as inTurns } from "./words.js";

/** So near to the end (pixels) it is taken that one reads along. */
const NEAR = 80;

export class TalkView {
  #talk;
  #shell;
  #head = el("header", { class: "head" });
  #notices = el("div", { class: "notices" });
  #turns = el("div", { class: "turns", role: "log", "aria-live": "off", "aria-label": "What was said", tabindex: "0" });
  #composer;
  #growing = null;
  #editing = null;
  #restored = null;
  #phase = "idle";
  #off = new AbortController();

  /** `shell` is what the page offers: `go(hash)`, `instead(hash)`, `changed(session)`, `missing(id)`, `gone(id)`. */
  constructor(talk, shell) {
    this.#talk = talk;
    this.#shell = shell;
    this.#composer = new Composer((text) => this.#say(text), () => this.#stop());
    this.nodes = [this.#head, this.#notices, this.#turns, this.#composer.node];
    const on = { signal: this.#off.signal };
    talk.addEventListener("change", () => this.#show(), on);
    talk.addEventListener("piece", (event) => this.#grow(event.detail), on);
  }

  /** Show it as it is known, and then as it is. */
  async open() {
    if (this.#talk.session === null) {
      this.#turns.append(el("p", { class: "quiet" }, "Opening…"));
      try {
        await this.#talk.load();
      } catch (error) {
        const refused = asRefused(error);
        if (refused.status === 404) this.#shell.missing(this.#talk.id);
        this.#refused(refused);
        return;
      }
    } else {
      this.#show();
      this.look();
    }
    const { id } = this.#talk.session;
    if (id !== this.#talk.id) { // it was asked for by its name, or the start of its id
      this.#shell.instead(`#/s/${id}`);
      return;
    }
    this.#turns.scrollTop = this.#turns.scrollHeight;
    this.#composer.focus();
  }

  close() {
    this.#off.abort();
  }

  /** See whether it moved on elsewhere, while nobody looked. */
  look() {
    this.#talk.look().catch(() => {}); // a service that is away is told of by the next thing that is asked of it
  }

  // --- verbs ----------------------------------------------------------------------------------

  #say(text) {
    this.#restored = null;
    this.#talk.say(text, settings());
    this.#turns.scrollTop = this.#turns.scrollHeight;
  }

  #stop() {
    if (this.#talk.phase === "replying") this.#talk.stop();
  }

  async #edit(turn, text) {
    this.#editing = null;
    if (turn.later === 0) {
      this.#talk.edit(text, settings());
    } else { // what came after it must not be lost: it goes on in the old session
      await this.#forked(turn.later, (talk) => talk.edit(text, settings()));
    }
  }

  async #forked(turnsBack, then = () => {}) {
    try {
      const made = await this.#talk.fork(turnsBack);
      inherit(made.id, this.#talk.id);
      this.#shell.changed(made);
      const talk = talkOf(made.id);
      await talk.load();
      then(talk);
      this.#shell.go(`#/s/${made.id}`);
      announce("Forked: this is the new conversation.");
    } catch (error) {
      this.#refused(asRefused(error));
    }
  }

  async #rewind(turn) {
    const back = turn.later + 1;
    if (back > 1 && !(await confirmed(`Take back ${inTurns(back)}?`, "A fork keeps them; a rewind does not.", "Rewind"))) return;
    this.#restored = await this.#talk.rewind(back);
    if (this.#restored === null) return;
    if (this.#composer.text === "") this.#composer.text = turn.messages[0].content;
    this.#show();
    this.#composer.focus();
  }

  async #rename() {
    const name = await named(this.#talk.session.name);
    if (name !== undefined) await this.#talk.rename(name);
  }

  async #remove() {
    const what = called(this.#talk.session);
    if (!(await confirmed("Forget this conversation?", `“${what}” is deleted; its forks stay.`, "Delete"))) return;
    try {
      await this.#talk.remove();
      this.#shell.gone(this.#talk.id);
    } catch (error) {
      this.#refused(asRefused(error));
    }
  }

  async #download(event) {
    const clicked = event.currentTarget;
    clicked.disabled = true;
    try {
      await download(this.#talk.session);
    } catch (error) {
      this.#refused(asRefused(error));
    } finally {
      clicked.disabled = false;
    }
  }

  async #reload() {
    try {
      await this.#talk.load();
      this.#composer.focus();
    } catch (error) {
      this.#refused(asRefused(error));
    }
  }

  #refused(refused) {
    if (refused.status === 412) {
      this.#talk.stale = true;
      this.#show();
      return;
    }
    const shown = refusal(refused, null, () => shown.remove());
    this.#notices.append(shown);
    if (this.#talk.session === null) this.#turns.replaceChildren(el("p", {}, el("a", { href: "#/" }, "All conversations")));
  }

  // --- what is shown --------------------------------------------------------------------------

  #show() {
    const { session, phase, draft } = this.#talk;
    if (session === null) return;
    const along = this.#isAtEnd();
    const focused = document.activeElement;
    this.#showHead(session);
    this.#showNotices();
    this.#showTurns();
    if (focused !== document.activeElement) this.#composer.focus(); // what had the focus is not there any more
    this.#composer.wait(phase !== "idle", phase === "settling");
    if (draft !== "" && phase === "idle") {
      this.#talk.draft = "";
      if (this.#composer.text === "") this.#composer.text = draft;
    }
    if (along) this.#turns.scrollTop = this.#turns.scrollHeight;
    this.#shell.changed(session);
    this.#tell(phase);
  }

  /** A screen reader hears a reply once it is whole, and not by the piece. */
  #tell(phase) {
    const last = this.#talk.messages.at(-1);
    if (phase === "idle" && this.#phase !== "idle" && last?.role === "assistant") announce(last.content);
    this.#phase = phase;
  }

  #showHead(session) {
    document.title = `${called(session)} · tenuto`;
    const facts = [session.name, session.model, inTurns(session.turns), tokens(session.length), session.resident ? "in memory" : "in the store"];
    this.#head.replaceChildren(
      el("a", { class: "back", href: "#/" }, "‹ All"),
      el("div", { class: "title" },
        el("h1", {}, called(session)),
        el("p", { class: "facts quiet" }, facts.filter(Boolean).join(" · "),
          session.parent ? el("a", { href: `#/s/${session.parent}` }, "its origin") : null),
      ),
      el("button", { type: "button", class: "menu-button", popovertarget: "menu", "aria-label": "What else can be done with it" }, "More"),
      el("div", { class: "row menu", id: "menu", popover: "auto" },
        button("Rename", () => this.#rename()),
        button("Download", (event) => this.#download(event), { id: "download" }),
        button("Delete", () => this.#remove()),
      ),
    );
  }

  #showNotices() {
    const { stale, trouble, unsaved, phase } = this.#talk;
    const shown = [];
    if (stale) {
      shown.push(notice("alert", [el("span", {}, "This conversation moved on elsewhere. What you see is an older turn of it.")],
        [button("Show it as it is now", () => this.#reload(), { id: "reload" })]));
    }
    if (trouble) shown.push(refusal(trouble.refused, trouble.again, () => this.#talk.dismiss()));
    if (unsaved && phase === "idle") {
      shown.push(notice("alert", [
        el("span", {}, `The last turn is in the service’s memory alone: ${unsaved.error.message}`), el("code", {}, unsaved.error.code),
      ], [button("Save it now", () => this.#talk.save(), { id: "save" })]));
    }
    if (this.#restored) {
      const { restored_tokens: restored, recomputed_tokens: recomputed, reason } = this.#restored;
      shown.push(notice("status", [
        el("span", {}, `Rewound: ${count(restored)} tokens stay restored, ${count(recomputed)} are to be read again.`), el("code", {}, reason),
      ], [button("Dismiss", () => { this.#restored = null; this.#show(); })]));
    }
    this.#notices.replaceChildren(...shown);
  }

  #showTurns() {
    const { messages, turn, phase } = this.#talk;
    const kept = turn === null ? messages : messages.slice(0, turn.from);
    const turns = turnsOf(kept);
    const nodes = turns.map((each) => this.#turnNode(each, turns, phase));
    this.#growing = null;
    if (turn !== null) nodes.push(...this.#saidNow(turn, nodes));
    if (nodes.length === 0) nodes.push(el("p", { class: "quiet empty" }, "Nothing was said yet."));
    this.#turns.replaceChildren(...nodes);
    this.#turns.setAttribute("aria-busy", String(phase !== "idle"));
  }

  /** The turn that is being said: a new article, or (said anew) the end of the last one. */
  #saidNow(turn, nodes) {
    this.#growing = document.createTextNode(turn.text);
    const bar = turn.told === null ? el("p", { class: "told untold" }, "reading…") : barOf(turn.told);
    const reply = messageOf("assistant", this.#growing, [bar]);
    reply.classList.add("growing");
    if (turn.asked === null) {
      nodes.at(-1)?.append(reply);
      return [];
    }
    return [el("article", { class: "turn" }, messageOf("user", turn.asked), reply)];
  }

  #turnNode(turn, turns, phase) {
    const article = el("article", { class: "turn" });
    turn.messages.forEach((message, number) => {
      const at = turn.at + number;
      if (this.#editing === at) article.append(this.#editor(turn, message));
      else article.append(messageOf(message.role, message.content, message.role === "assistant" ? [this.#bar(at, message)] : []));
    });
    if (asks(turn)) article.append(this.#actions(turn, turns, phase !== "idle"));
    return article;
  }

  #bar(at, message) {
    const told = seen(this.#talk.id, at, message.content);
    return told === null ? untold(message) : barOf(told);
  }

  #actions(turn, turns, disabled) {
    const isLast = turn.later === 0;
    const number = turns.filter(asks).indexOf(turn) + 1;
    const isReplied = turn.messages.at(-1).role === "assistant";
    const action = (text, verb, what) => button(text, verb, { disabled, "aria-label": `${what}, turn ${number}`, title: what });
    return el("div", { class: "actions" },
      isLast && isReplied ? action("Regenerate", () => this.#talk.regenerate(otherwise(this.#talk.session)), "Say this reply anew") : null,
      action("Edit", () => { this.#editing = turn.at; this.#show(); this.#focusEditor(); },
        isLast ? "Say something else instead" : "Say something else instead, in a fork"),
      action("Fork", () => this.#forked(turn.later), "A new conversation that goes on from here"),
      action("Rewind", () => this.#rewind(turn), isLast ? "Take this turn back" : `Take back this turn and ${count(turn.later)} after it`),
    );
  }

  #editor(turn, message) {
    const field = el("textarea", { id: "edit", rows: "2", "aria-label": "Your message, otherwise" });
    field.value = message.content;
    const done = () => { if (field.value.trim() !== "") this.#edit(turn, field.value); };
    const cancel = () => { this.#editing = null; this.#show(); this.#composer.focus(); };
    enterSends(field, done);
    field.addEventListener("keydown", (event) => { if (event.key === "Escape") cancel(); });
    return el("form", { class: "message user editor", onsubmit: (event) => { event.preventDefault(); done(); } },
      field,
      el("div", { class: "row" },
        el("button", { class: "primary" }, turn.later === 0 ? "Say this instead" : "Say this in a fork"),
        button("Cancel", cancel),
      ),
    );
  }

  #focusEditor() {
    const field = document.getElementById("edit");
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  #grow(text) {
    if (this.#growing === null) return;
    const along = this.#isAtEnd();
    this.#growing.appendData(text);
    if (along) this.#turns.scrollTop = this.#turns.scrollHeight;
  }

  #isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.#turns;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }
}
