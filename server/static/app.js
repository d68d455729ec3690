// The page: puts the parts together, and draws at most once per frame.

import { Connection } from "./connection.js";
import { formatCount, formatMillis, formatRate, formatShort } from "./format.js";
import { Memory } from "./memory.js";
import { readSampling, watchSampling } from "./sampling.js";
import { Session } from "./session.js";
import { Story } from "./story.js";

const $ = (id) => document.getElementById(id);
const buttons = { generate: $("generate"), stop: $("stop"), continue: $("continue"), new: $("new") };
const prompt = $("prompt");

const story = new Story($("page"), $("story"), $("latest"));
const memory = new Memory({
  chart: $("chart"),
  stateBytes: $("state-bytes"),
  cacheBytes: $("cache-bytes"),
  verdict: $("verdict"),
});
const connection = new Connection({ onStatus, onModel, onEvent: (event) => session.handle(event) });
const session = new Session((message) => connection.send(message), {
  onText: (text) => story.append(text),
  onEnd,
  onError: showNotice,
  onChange: scheduleFrame,
});

let opening = prompt.value;
let connected = false;
let countdown = null;
let frame = null;

function scheduleFrame() {
  frame ??= requestAnimationFrame(drawFrame);
}

function drawFrame(now) {
  frame = null;
  story.flush();
  story.setLive(session.run !== null);
  memory.show(session.position);
  $("position").textContent = formatCount(session.position);
  showSpeed(now);
  showButtons();
  if (session.run) scheduleFrame();
}

function showSpeed(now) {
  const { meter, run } = session;
  const rate = run ? meter.currentRate(now) : meter?.meanRate();
  const first = meter?.firstTokenMs ?? null;
  if (rate || !run) $("rate").textContent = rate ? formatRate(rate) : "–";
  $("first-token").textContent = first === null ? "–" : formatMillis(first);
}

function showButtons() {
  const running = session.run !== null;
  const canStart = connected && !running;
  const empty = prompt.value === "";
  const enabled = {
    generate: canStart && !empty,
    stop: running,
    continue: canStart && session.id !== null,
    new: session.id !== null || running || story.story.hasChildNodes(),
  };
  const main = running ? "stop" : empty && session.id ? "continue" : "generate";
  const focused = document.activeElement;
  for (const [name, button] of Object.entries(buttons)) {
    button.disabled = !enabled[name];
    button.classList.toggle("primary", name === main);
  }
  const focusLost = focused?.disabled && Object.values(buttons).includes(focused);
  if (focusLost && enabled[main]) buttons[main].focus();
  prompt.placeholder = session.id ? "Add words of your own, or continue" : "Write a beginning";
}

function start(text) {
  const sampling = $("controls");
  if (!sampling.checkValidity()) {
    $("sampling").open = true;
    sampling.reportValidity();
    return;
  }
  const endedBefore = session.atEndOfText;
  const fresh = session.id === null;
  if (!session.generate(text, readSampling(sampling))) {
    showNotice("There is no connection to the server at the moment.");
    return;
  }
  hideNotice();
  if (fresh) story.clear();
  else if (endedBefore) story.addBreak();
  $("intro").hidden = true;
  $("summary").textContent = "";
  if (text) story.addPrompt(text);
  if (fresh) opening = text;
  prompt.value = "";
}

function startFresh() {
  session.reset();
  story.clear();
  hideNotice();
  $("intro").hidden = false;
  $("summary").textContent = "";
  if (prompt.value === "") prompt.value = opening;
  prompt.focus();
  scheduleFrame();
}

function onEnd({ reason, seed, tokens }) {
  const how = { stop: "End of the text", cancelled: "Stopped", error: "Broken off" }[reason];
  const count = `${formatCount(tokens)} ${tokens === 1 ? "token" : "tokens"}`;
  $("summary").textContent = `${how ? `${how}, ` : ""}${count}, seed ${seed}`;
}

function onModel(model) {
  memory.setModel(model);
  const { parameters, attention } = model.everstream;
  const parts = [model.id, `${formatShort(parameters)} parameters`, `${attention} attention`];
  $("model").textContent = parts.join(" · ");
  scheduleFrame();
}

function onStatus(status) {
  connected = status.state === "open";
  clearInterval(countdown);
  $("connection").dataset.state = status.state;
  $("retry").hidden = status.state !== "waiting";
  showKeyForm(status);
  if (connected) session.freeDoomed();
  else session.connectionLost();
  const words = { connecting: "Connecting", open: "Connected", key: "Key wanted" };
  $("connection-text").textContent = words[status.state] ?? status.reason;
  $("countdown").textContent = "";
  if (status.state === "waiting") startCountdown(status.delayMs);
  scheduleFrame();
}

function startCountdown(delayMs) {
  const until = performance.now() + delayMs;
  const show = () => {
    const seconds = Math.max(1, Math.ceil((until - performance.now()) / 1000));
    $("countdown").textContent = `Trying again in ${seconds}\u00a0s`;
  };
  show();
  countdown = setInterval(show, 1000);
}

function showKeyForm({ state, rejected }) {
  if (state === "connecting") return;
  $("key-form").hidden = state !== "key";
  if (state !== "key") return;
  $("key-hint").textContent = rejected
    ? "The server did not accept that key."
    : "It is kept in this browser tab only.";
  $("key").focus();
}

function showNotice(words) {
  $("notice").textContent = words;
  $("notice").hidden = false;
}

function hideNotice() {
  $("notice").hidden = true;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  start(prompt.value);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  connection.useKey($("key").value.trim());
  $("key").value = "";
});
buttons.stop.addEventListener("click", () => session.stop());
buttons.continue.addEventListener("click", () => start(""));
buttons.new.addEventListener("click", startFresh);
$("retry").addEventListener("click", () => connection.connect());
prompt.addEventListener("input", scheduleFrame);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  const idle = connected && session.run === null;
  if (idle && (prompt.value !== "" || session.id !== null)) start(prompt.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") session.stop();
});
window.addEventListener("online", () => connection.connect());
window.addEventListener("pagehide", (event) => {
  if (session.id && !event.persisted) {
    connection.request(`v1/sessions/${session.id}`, { method: "DELETE", keepalive: true });
  }
});

watchSampling($("controls"), $("sampling"));
connection.connect();
