// What stands on the page before the first message, and what to do about an error.

import { formatBytes, formatShort } from "./format.js";

const EXAMPLES = [
  "Explain in three sentences why the sea is salty.",
  "Write a Python function that counts the words in a file.",
  "Give me a packing list for a weekend in the mountains.",
  "Make this friendlier: “I need the report today.”",
];

/** Says what `model` is for, or where there is none to chat with, what `other` does. */
export function welcome($, model, other, send) {
  $("examples").hidden = !model;
  $("to-text").hidden = Boolean(model);
  if (!model) {
    $("welcome-title").textContent = "No model of this server can chat";
    $("welcome-text").textContent = `${other.id} has no chat template: it continues a text that you begin, such as a story.`;
    $("welcome-hint").textContent = "To chat, start the server with a model that has a chat template: everstream serve --model …";
    return;
  }
  $("welcome-title").textContent = `Chat with ${model.id}`;
  $("welcome-text").textContent = "It answers questions, and writes and changes texts and code. Check what matters.";
  $("welcome-hint").textContent = `${formatShort(model.everstream.parameters)} parameters, ${memoryOf(model.everstream)}. The conversation survives a reload and a restart of the server.`;
  $("examples").replaceChildren(...EXAMPLES.map((text) => exampleOf(text, send)));
}

function memoryOf({ state_bytes_per_session: bytes, state_bytes_per_token: perToken }) {
  return perToken ? `at most ${formatBytes(bytes)} of memory per conversation` : `${formatBytes(bytes)} of memory, however long the conversation gets`;
}

function exampleOf(text, send) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(text);
  button.addEventListener("click", () => send(text));
  return button;
}

/** What somebody who chats can do about a refusal of the server's. */
export function adviceOn({ code, status }) {
  if (code === "context_length_exceeded" || status === 413) return "Begin a new chat, or write less.";
  if (code === "model_not_found") return "Choose another model above.";
  if (status === 403) return "Ask the operator of this server for another key.";
  if (status === 429 || status >= 500) return "Wait a moment and send it again.";
  return "";
}
