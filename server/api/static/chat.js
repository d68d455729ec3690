// The page at `/chat`: a conversation that outlives the page and the server.

import { Announcer } from "./announcer.js";
import { Answer } from "./answer.js";
import { newKey } from "./client/retry.js";
import { Conversation } from "./conversation.js";
import { Follower } from "./follower.js";
import { follow, forget, refusalOf } from "./responses.js";
import { copyText } from "./sharing.js";
import { watchTheme } from "./switches.js";
import { adviceOn, welcome } from "./welcome.js";

const KEY_NAME = "everstream.key";
const POSSIBLE_KEY = /^[\x21-\x7e]+$/;
const MAX_SEED = 2 ** 31;
const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 5000;

const $ = (id) => document.getElementById(id);

const announcer = new Announcer($("spoken"));
const follower = new Follower($("scroll"), $("to-end"));
const conversation = new Conversation(() => {
  show();
  if (conversation.open && !reading) elsewhere();
});
let models = []; // those that chat
let shown = null; // the `Answer` of the last turn
let reading = null; // `{turn, answer, abort, tries}` while this page reads the answer

const model = () => models.find(({ id }) => id === $("model").value) ?? models[0];

function headers() {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function connect() {
  say("");
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) return askForKey();
    if (!response.ok) throw await refusalOf(response);
    open((await response.json()).data);
  } catch (error) {
    const words = error instanceof TypeError ? "the server cannot be reached" : error.message;
    say(`${sentence(words)} This page needs it to find its models.`, { label: "Try again", act: connect });
  }
}

function askForKey() {
  const wasWrong = Boolean(sessionStorage.getItem(KEY_NAME));
  $("key-hint").textContent = wasWrong ? "The server did not accept that key." : "It is kept in this browser tab only.";
  $("key-form").hidden = false;
  $("key").focus();
}

/** The server is there, with these models: the conversation goes on. */
function open(all) {
  const wanted = $("model").value || conversation.turns.at(-1)?.model;
  models = all.filter(({ everstream }) => everstream.chat);
  $("key-form").hidden = true;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  $("model").hidden = !models.length;
  if (models.some(({ id }) => id === wanted)) $("model").value = wanted;
  $("composer").hidden = $("new").hidden = !models.length;
  show();
  welcome($, model(), all[0], send);
  if (conversation.open && models.length) read(conversation.open, true);
  else if (models.length) $("prompt").focus({ preventScroll: true });
}

/** Shows the conversation anew, as the browser keeps it. */
function show() {
  if (reading && reading.turn.key === conversation.open?.key) {
    reading.turn = conversation.open;
    return;
  }
  leave();
  say("");
  $("messages").replaceChildren();
  for (const turn of conversation.turns) {
    shown = ask(turn);
    if (turn.end) shown.end(turn);
  }
  draw();
  follower.follow();
}

/** Shows a question; returns what its answer is written to. */
function ask({ prompt }) {
  const item = document.createElement("li");
  item.className = "user";
  item.append(prompt); // as text, never as HTML
  $("messages").append(item);
  return new Answer($("messages"), () => follower.grown());
}

function draw() {
  const isOpen = Boolean(conversation.open);
  $("welcome").hidden = conversation.turns.length > 0;
  $("new").disabled = !conversation.turns.length;
  $("send").disabled = isOpen || !models.length;
  $("send").hidden = isOpen;
  $("stop").disabled = $("stop").hidden = !isOpen;
  $("thinks-label").hidden = !model()?.everstream.thinking;
}

function send(prompt) {
  const effort = model().everstream.thinking ? { effort: $("thinks").checked ? "medium" : "none" } : {};
  const seed = Math.floor(Math.random() * MAX_SEED);
  const turn = { key: newKey(), model: model().id, prompt, seed, ...effort };
  conversation.turns.push(turn);
  keep();
  shown = ask(turn);
  follower.follow();
  read(turn, false);
}

/** Reads the answer to its end, or to its next part where the server `mayHaveIt` by now. */
async function read(turn, mayHaveIt) {
  const mine = (reading = { turn, answer: shown, abort: new AbortController(), tries: 0 });
  const { signal } = mine.abort;
  if (shown.text || shown.thought) shown.restart(); // all of it comes again
  say("");
  draw();
  try {
    const lost = (error) => wait(mine, error);
    for await (const event of follow(conversation.bodyOf(turn), { headers, signal, mayHaveIt, lost })) take(mine, event);
  } catch (error) {
    if (!signal.aborted) fail(mine, error);
  }
}

function take(mine, event) {
  const { answer } = mine;
  if (mine.tries && event.type !== "restarted") {
    mine.tries = 0;
    say("");
  }
  if (event.type === "restarted") answer.restart();
  else if (event.type === "response.created") {
    mine.turn.id = event.response.id;
    keep();
  } else if (event.type === "response.reasoning_text.delta") answer.think(event.delta);
  else if (event.type === "response.output_text.delta") {
    answer.write(event.delta);
    announcer.add(event.delta);
  } else if (event.type === "response.failed") fail(mine, event.response.error);
  else if (event.type === "response.completed") finish("stop", usageOf(event.response));
  else if (event.type === "response.incomplete") {
    finish(event.response.status === "cancelled" ? "stopped" : "length", usageOf(event.response));
  }
}

function usageOf({ usage }) {
  const { input_tokens: read, output_tokens: written, input_tokens_details: details } = usage;
  return { read, written, cached: details.cached_tokens };
}

/** Ends the open turn with what is shown of its answer. */
function finish(end, usage) {
  const turn = conversation.open;
  const body = conversation.bodyOf(turn);
  leave();
  Object.assign(turn, { answer: shown.text, thought: shown.thought, end, usage });
  shown.end(turn);
  say("");
  keep();
  forget(body, turn.id, headers()).catch(() => {}); // it expires then
  draw();
  $("prompt").focus({ preventScroll: true });
}

/** Reads no more. */
function leave() {
  reading?.abort.abort();
  reading = null;
}

/** Resolves when it is time to ask again. */
function wait(mine, error) {
  const what = error instanceof TypeError ? "The connection to the server is lost." : sentence(error.message);
  const delay = Math.min(MAX_DELAY_MS, FIRST_DELAY_MS * 2 ** mine.tries);
  mine.tries += 1;
  return new Promise((resolve) => {
    setTimeout(resolve, delay);
    mine.abort.signal.addEventListener("abort", resolve);
    say(`${what} Nothing is lost: the answer continues here as soon as the server is back.`, {
      label: "Try now",
      act: resolve,
    });
  });
}

/** The answer cannot be read; what was not answered can be sent again. */
function fail({ turn, answer }, error) {
  reading = null;
  if (error.status === 401) askForKey();
  else if (error.code === "session_attached") elsewhere();
  else if (answer.text) {
    finish("failed");
    say(`${sentence(error.message)} ${adviceOn(error)}`);
  } else {
    conversation.turns = conversation.turns.filter((each) => each !== turn);
    keep();
    show();
    $("prompt").value ||= turn.prompt;
    $("prompt").focus({ preventScroll: true });
    say(`${sentence(error.message)} ${adviceOn(error)} Your message is in the box again.`);
  }
  draw();
}

function elsewhere() {
  say("Another window shows this answer while it is written.", {
    label: "Show it here",
    act: () => read(conversation.open, true),
  });
}

function keep() {
  try {
    conversation.save();
  } catch {
    say("The browser has no room for more of this conversation: a reload loses its end. Begin a new chat.");
  }
}

function say(words, action) {
  $("notice-text").textContent = words;
  $("notice").hidden = !words;
  $("notice-action").hidden = !action;
  if (!action) return;
  $("notice-action").textContent = action.label;
  $("notice-action").onclick = action.act;
}

function sentence(words) {
  return `${words[0].toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (conversation.open || !models.length || !text.trim()) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => finish("stopped"));
document.addEventListener("keydown", ({ key }) => key === "Escape" && conversation.open && finish("stopped"));
$("new").addEventListener("click", () => {
  if (conversation.open) finish("stopped");
  conversation.turns = [];
  keep();
  show();
  $("prompt").focus();
});
$("messages").addEventListener("click", async ({ target }) => {
  const code = target.closest(".copy-code")?.closest(".code").querySelector("code").textContent;
  const item = target.closest(".copy-answer")?.closest("li");
  const text = code ?? (item && conversation.turns[[...$("messages").children].indexOf(item) >> 1].answer);
  if (text === undefined) return;
  await copyText(text, "Copied", (words) => {
    target.textContent = words;
    announcer.say(words);
  });
});
$("model").addEventListener("change", () => {
  welcome($, model(), null, send);
  draw();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  sessionStorage.setItem(KEY_NAME, POSSIBLE_KEY.test(key) ? key : "-");
  connect();
});
watchTheme($("theme"));
connect();
