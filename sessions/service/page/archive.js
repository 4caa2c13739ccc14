// Conversations as `.tenuto` archives: one is fetched whole before it is handed to the browser, so that a part of
// one is never taken for it.

import { Refused, asked, request, sessionPath } from "./api.js";
import { el } from "./dom.js";

/** Throws Refused. */
export async function download(session) {
  const answer = await request("GET", sessionPath(session.id, "export"));
  let blob;
  try {
    blob = await answer.blob();
  } catch {
    throw new Refused(0, { code: "broke_off", message: "The archive broke off, and nothing of it was kept." });
  }
  const link = el("a", { href: URL.createObjectURL(blob), download: `${session.name ?? session.id}.tenuto` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** The session that an archive is. Throws Refused. */
export async function upload(file) {
  const { data } = await asked("POST", "/v1/sessions/import", { body: file, headers: { "content-type": "application/vnd.tenuto" } });
  return data;
}
