// The page: puts the parts together, and draws at most once per frame.

import { sessionsIn, showAddress } from "./address.js";
import { Announcer } from "./announcer.js";
import { TokenCard } from "./card.js";
import { Comparison } from "./compare.js";
import { Composer } from "./composer.js";
import { formatCount, formatMillis, formatRate, formatShort } from "./format.js";
import { watchKeys } from "./keys.js";
import { Memory } from "./memory.js";
import { Panes } from "./panes.js";
import { showDefaults, watchSampling } from "./sampling.js";
import { Server } from "./server.js";
import { copyText, shareLink } from "./sharing.js";
import { SpeedChart } from "./speed.js";
import { Status } from "./status.js";
import { watchTheme, watchUnlikely } from "./switches.js";

const $ = (id) => document.getElementById(id);

const server = new Server({ onStatus, onModels });
const status = new Status($, server);
const panes = new Panes({
  row: $("panes"),
  tabs: $("tabs"),
  template: $("pane-template"),
  server,
  onAdd: (pane) => card.watch(pane),
  onChange: scheduleFrame,
});
const memory = new Memory({
  chart: $("chart"),
  stateBytes: $("state-bytes"),
  cacheBytes: $("cache-bytes"),
  verdict: $("verdict"),
  stateParts: $("state-parts"),
});
const speed = new SpeedChart($("speed-chart"), $("token-ms"));
const announcer = new Announcer($("announcer"));
const composer = new Composer($, panes, server);
const comparison = new Comparison(panes, $("comparison"));
const card = new TokenCard($("card"), { fork, rewind, instead }, (words) => announcer.say(words));

const toRestore = sessionsIn(location.hash);
// A link to a session, or a request for text, stays on this page.
const prefersChat = !toRestore.length && !new URLSearchParams(location.search).has("text");
let models = [];
let frame = null;
let spoken = { pane: null, count: 0 };

function scheduleFrame() {
  frame ??= requestAnimationFrame(drawFrame);
}

function drawFrame(now) {
  frame = null;
  const { active, list } = panes;
  for (const pane of list) pane.view.draw(pane, now, pane === active);
  showFigures(active, now);
  composer.draw();
  comparison.draw();
  speak(active);
  if (!toRestore.length) showAddress(list);
  $("add-pane").disabled = panes.isFull;
  $("copy").disabled = active.isEmpty;
  $("share").disabled = active.session === null;
  $("compare").hidden = list.length < 2;
  document.body.classList.toggle("single", list.length === 1);
  if (list.some((pane) => pane.run)) scheduleFrame();
}

function showFigures(pane, now) {
  const { meter, run, model, series } = pane;
  const { position } = pane.transcript;
  if (model) memory.setModel(model);
  memory.show(position);
  speed.draw(series, position);
  $("position").textContent = formatCount(position);
  const rate = run ? meter.currentRate(now) : meter?.meanRate();
  const first = meter?.firstTokenMs ?? null;
  if (rate || !run) $("rate").textContent = rate ? formatRate(rate) : "–";
  $("first-token").textContent = first === null ? "–" : formatMillis(first);
}

function speak(pane) {
  const { pieces } = pane.transcript;
  if (spoken.pane !== pane || spoken.count > pieces.length) spoken = { pane, count: pieces.length };
  const fresh = pieces.slice(spoken.count).filter((piece) => piece.kind === "token");
  spoken.count = pieces.length;
  if (fresh.length) announcer.add(fresh.map((piece) => piece.text).join(""));
}

function addPane() {
  if (panes.add()) $("prompt").focus();
}

async function fork(pane, piece) {
  const copy = await panes.fork(pane, piece.end);
  if (copy) $("prompt").focus({ preventScroll: true });
}

function rewind(pane, piece) {
  return pane.rewind(piece.end);
}

/** Forks before a token, and goes on with another one in its place. */
async function instead(pane, piece, token) {
  const text = await server.textOf(token, pane.model?.id);
  const copy = await panes.fork(pane, piece.start);
  if (!copy) return;
  await copy.feed(token, text ?? "");
  composer.continueIn(copy);
}

function onModels(list) {
  if (!models.length && list[0].everstream.chat && prefersChat) location.replace("chat");
  $("chat-link").hidden = !list.some(({ everstream }) => everstream.chat);
  models = list;
  showDefaults($("controls"), models[0].everstream.sampling);
  const picker = $("model");
  const chosen = models.find((model) => model.id === picker.value) ?? models[0];
  const options = models.map((model) => new Option(model.id, model.id, false, model === chosen));
  picker.replaceChildren(...options);
  picker.hidden = models.length < 2;
  chooseModel(chosen);
}

/** New sessions are of this model, and those in which nothing has been written. */
function chooseModel(model) {
  panes.model = model;
  for (const pane of panes.list) {
    if (!pane.session && !pane.run) pane.model = model;
    else pane.model = models.find(({ id }) => id === pane.model?.id) ?? pane.model ?? model;
  }
  const { parameters, attention } = model.everstream;
  const facts = [`${formatShort(parameters)} parameters`, `${attention} attention`];
  if (models.length < 2) facts.unshift(model.id);
  $("model-facts").textContent = facts.join(" · ");
  scheduleFrame();
}

function onStatus(now) {
  status.show(now);
  if (server.isOpen && toRestore.length) restore();
  if (now.state === "waiting") for (const pane of panes.list) pane.connectionLost();
  scheduleFrame();
}

function say(words) {
  panes.active.summary = words;
  scheduleFrame();
}

/** Shows the sessions of the address, once. */
async function restore() {
  $("prompt").value = "";
  await panes.restore(toRestore.splice(0));
}

function toggleCompare() {
  if (panes.list.length < 2) return;
  comparison.toggle();
  $("compare").setAttribute("aria-pressed", String(comparison.isOn));
}

$("model").addEventListener("change", ({ target }) => {
  chooseModel(models.find((model) => model.id === target.value));
});
$("add-pane").addEventListener("click", addPane);
$("compare").addEventListener("click", toggleCompare);
$("copy").addEventListener("click", () => copyText(panes.active.text, "Text copied", say));
$("share").addEventListener("click", () => shareLink(panes.active, say));
$("everywhere").addEventListener("change", scheduleFrame);
$("help-open").addEventListener("click", () => $("help").showModal());
window.addEventListener("online", () => server.connect());

watchKeys({
  escape: () => (card.isOpen ? card.hide() : composer.stop()),
  add: addPane,
  close: () => panes.remove(panes.active),
  compare: toggleCompare,
  unlikely: () => $("unlikely").click(),
  theme: () => $("theme").click(),
  goTo: (index) => panes.list[index] && panes.activate(panes.list[index]),
});
watchTheme($("theme"));
watchUnlikely($("unlikely"));
watchSampling($("controls"), $("sampling"));
panes.add();
server.connect();
