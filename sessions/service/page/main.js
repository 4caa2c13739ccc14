// The page: a list beside what the address names. `#/s/ID` is a conversation, so that back and forward go between them.

import { asRefused } from "./api.js";
import { upload } from "./archive.js";
import { announce, el } from "./dom.js";
import { ask, reveal } from "./key.js";
import { ListView } from "./list_view.js";
import { NewView } from "./new_view.js";
import { notice, refusal } from "./notice.js";
import { Sessions } from "./sessions.js";
import { StorageView } from "./storage_view.js";
import { TalkView } from "./talk_view.js";
import { close, talkOf } from "./talks.js";
import { called, size } from "./words.js";

const main = document.getElementById("main");
const sessions = new Sessions();
const list = new ListView(sessions);
let view = null;

const shell = {
  go(hash) {
    location.hash = hash;
  },
  instead(hash) {
    location.replace(hash);
  },
  changed(session) {
    sessions.put(session);
  },
  missing(id) {
    close(id);
    sessions.drop(id);
  },
  gone(id) {
    shell.missing(id);
    shell.instead("#/");
    announce("Deleted.");
  },
};

/** What the address names: the name of the view, and the view. */
function named(hash) {
  const [, where, id] = hash.split("/");
  if (where === "s" && id) return ["talk", () => new TalkView(talkOf(decoded(id)), shell), decoded(id)];
  if (where === "storage") return ["storage", () => new StorageView(sessions), null];
  return [where === "new" ? "new" : "list", () => new NewView(shell), null];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function show() {
  const [name, make, id] = named(location.hash);
  view?.close();
  view = make();
  document.body.dataset.view = name;
  main.replaceChildren(...view.nodes);
  list.mark(id);
  view.open();
}

async function imported(field) {
  const [file] = field.files;
  field.value = "";
  if (!file) return;
  const at = document.getElementById("side-notices"); // beside the button: on a phone the rest is not shown
  const taking = notice("status", [el("span", {}, `Importing ${file.name}, ${size(file.size)}…`)], []);
  at.replaceChildren(taking);
  try {
    const session = await upload(file);
    sessions.put(session);
    announce(`Imported: ${called(session)}`);
    shell.go(`#/s/${session.id}`);
  } catch (error) {
    const shown = refusal(asRefused(error), null, () => shown.remove());
    at.append(shown);
  } finally {
    taking.remove();
  }
}

/** Somebody looks again: others may have been here meanwhile. */
function look() {
  view.look();
  sessions.refresh().catch(() => {}); // a service that is away is told of by the next thing that is asked of it
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") look();
});
addEventListener("focus", look);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names what is shown, and not a place on the page
  main.focus();
});
document.getElementById("import").addEventListener("change", (event) => imported(event.target));
document.getElementById("key").addEventListener("click", async () => {
  if (await ask("Another key, and with it another tenant’s conversations. Without one nothing changes.")) location.reload();
});
reveal();
show();
list.read();
