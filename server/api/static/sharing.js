// Copies a text or a link to a session, and hands the link to the device where it can share.

import { addressOf } from "./address.js";

/** Puts `text` on the clipboard and tells `say` what has become of it. */
export async function copyText(text, done, say) {
  say((await write(text)) ? done : "This browser does not let the page copy. Select the text instead.");
}

/** Shares a link to the session of `pane`, or copies it where the device has no way to share. */
export async function shareLink(pane, say) {
  const url = new URL(addressOf([pane]), location.href).href;
  if (navigator.share && matchMedia("(pointer: coarse)").matches) {
    await navigator.share({ title: document.title, url }).catch(() => {}); // the reader changed their mind
    return;
  }
  await copyText(url, "Link to this session copied", say);
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text); // the clipboard is for secure contexts only
  }
}

function copySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
