// The page at `/chat`: messages to the model's template, by chat completions.

import { errorOf, streamChat } from "./completions.js";
import { formatCount } from "./format.js";

const KEY_NAME = "everstream.key";

const $ = (id) => document.getElementById(id);

const messages = []; // as the API has them
let models = [];
let running = null; // an AbortController

const model = () => models.find(({ id }) => id === $("model").value) ?? models[0];

function headers() {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function findModels() {
  const response = await fetch("v1/models", { headers: headers() });
  $("key-form").hidden = response.status !== 401;
  if (response.status === 401) throw new Error("The server asks for a key.");
  if (!response.ok) throw await errorOf(response);
  const { data } = await response.json();
  models = data.filter(({ everstream }) => everstream.chat);
  $("model").hidden = !models.length;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  draw();
  if (!models.length) {
    throw new Error("No model of this server has a chat template. “Text and sessions”, above, continues a text.");
  }
}

function draw() {
  $("send").disabled = running !== null || !models.length;
  $("stop").disabled = running === null;
  $("thinks-label").hidden = !model()?.everstream.thinking;
  $("messages").setAttribute("aria-busy", String(running !== null));
}

/** Shows a message; returns what more of it can be written to. */
function show(role, text = "") {
  const item = document.createElement("li");
  item.className = role;
  const words = document.createElement("div");
  words.className = "words";
  words.append(text); // as text, never as HTML
  item.append(words);
  $("messages").append(item);
  return { item, words, thinking: null };
}

/** More of what the model thinks, which is folded away. */
function think(shown, text) {
  if (!shown.thinking) {
    const details = document.createElement("details");
    details.className = "thinking";
    const summary = document.createElement("summary");
    summary.append("Thinking");
    shown.thinking = document.createElement("div");
    shown.thinking.className = "words";
    details.append(summary, shown.thinking);
    shown.item.prepend(details);
  }
  shown.thinking.append(text);
}

async function send(text) {
  say("");
  running = new AbortController();
  const asked = show("user", text);
  const shown = show("assistant");
  const answer = { role: "assistant", content: "", reasoning_content: "" };
  draw();
  let failed = null;
  try {
    for await (const { delta, usage } of streamChat(body(text), headers(), running.signal)) {
      answer.content += delta.content ?? "";
      answer.reasoning_content += delta.reasoning_content ?? "";
      if (delta.reasoning_content) think(shown, delta.reasoning_content);
      if (delta.content) shown.words.append(delta.content);
      if (usage) $("summary").textContent = figures(usage);
      if (nearEnd()) shown.item.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") failed = error;
  }
  running = null;
  if (!asked.item.isConnected) {
    // Another chat has begun, and this message is no part of it.
  } else if (failed && !answer.content) {
    // What was not answered can be sent again.
    asked.item.remove();
    shown.item.remove();
    $("prompt").value ||= text;
  } else {
    if (!answer.reasoning_content) delete answer.reasoning_content;
    messages.push({ role: "user", content: text }, answer);
  }
  if (failed) say(failed.message);
  draw();
  $("prompt").focus({ preventScroll: true });
}

function body(text) {
  const { id, everstream } = model();
  const effort = everstream.thinking ? { reasoning_effort: $("thinks").checked ? "medium" : "none" } : {};
  return { model: id, messages: [...messages, { role: "user", content: text }], ...effort };
}

function figures({ prompt_tokens: read, completion_tokens: written, prompt_tokens_details: details }) {
  const cached = details?.cached_tokens ?? 0;
  return `${formatCount(written)} tokens, ${formatCount(read)} read, ${formatCount(cached)} of them cached`;
}

function nearEnd() {
  return document.documentElement.scrollHeight - window.scrollY - window.innerHeight < 200;
}

function say(words) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
}

function connect() {
  say("");
  findModels().catch((error) => say(error.message));
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !models.length || !text.trim()) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", ({ key }) => key === "Escape" && running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("messages").replaceChildren();
  $("summary").textContent = "";
  say("");
});
$("model").addEventListener("change", draw);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_NAME, $("key").value);
  connect();
});
connect();
