// What the client makes of a server that says what a test tells it to; no clock, no network.

import * as everstream from "../../../clients/javascript/everstream.js";
import { eventsOf, holds, raises, same } from "./check.mjs";
import { StubServer, StubTimers } from "./stub.mjs";

const PLACE = { session: "sess_1", epoch: "e-0" };
const started = (request_id, seq = 0) => ({
  ...{ type: "started", request_id, ...PLACE, seq, position: 0, seed: 7 },
});
const token = (request_id, seq) => ({
  ...{ type: "token", request_id, seq, position: seq, token_id: seq, text: `${seq} ` },
});
const finished = (request_id, seq, finish_reason = "length", more = {}) => ({
  ...{ type: "finished", request_id, session: PLACE.session, seq, position: seq, text: "" },
  ...{ finish_reason, usage: {}, ...more },
});
const resumed = (request_id, seq, last_seq, busy, type = "resumed") => ({
  ...{ type, request_id, ...PLACE, seq, last_seq, position: last_seq, busy, reason: "why" },
});
const refusal = (request_id, status, code, more = {}) => ({
  ...{ type: "error", request_id, status, error: { message: code, code, param: null, ...more } },
});

function begin(options = {}) {
  const [server, timers, statuses] = [new StubServer(), new StubTimers(), []];
  const { WebSocket } = server;
  const onStatus = (status) => statuses.push(status);
  const client = new everstream.Client("http://host:1/base/", {
    ...{ WebSocket, timers, onStatus, random: () => 1, ...options },
  });
  const say = (...events) => server.last.say(...events);
  return { server, timers, statuses, client, say };
}

/** A kept generation that has had one token. */
function running(options) {
  const world = begin(options);
  const generation = world.client.complete("x", { keep: true });
  world.server.last.open();
  world.say(started("r1"), token("r1", 1));
  return { ...world, generation };
}

const seqs = (events) => events.map((event) => event.seq);

export const scenarios = {
  async "the address and the key are those that were given"() {
    const { server, client } = begin({ apiKey: "kü/+" });
    client.connect();
    same(server.last.url, "ws://host:1/base/v1/stream");
    same(server.last.protocols, ["everstream.v1", "everstream.key.a8O8Lys"]);
    for (const url of ["ftp://host", "host"]) {
      await raises(TypeError, (async () => new everstream.Client(url))());
    }
  },

  async "a passing end is followed by a resume from the last event"() {
    for (const code of [1001, 1005, 1006, 1011, 1012, 1013, 1015]) {
      const { server, timers, say, generation } = running();
      const key = server.last.sent[0].idempotency_key;
      holds(key.length > 20, "it has a key of its own");
      server.last.end(code);
      timers.pass(499);
      same(server.sockets.length, 1);
      timers.pass(1);
      server.last.open();
      const cursor = { session: "sess_1", epoch: "e-0", last_seq: 1, take_over: true };
      same(server.last.sent, [{ type: "resume", ...cursor, request_id: "r1" }]);
      say(resumed("r1", 1, 2, true), token("r1", 2), token("r1", 3), finished("r1", 4));
      same(seqs(await eventsOf(generation)), [1, 2, 3, 4]);
    }
  },

  async "another end is the end of what runs"() {
    for (const code of [1000, 1002, 1007, 4000]) {
      const { server, timers, generation, statuses } = running();
      server.last.end(code);
      same((await generation.next()).value.seq, 1);
      await raises(everstream.ConnectionLost, generation.next());
      same([(await generation.next()).done, statuses.at(-1).state], [true, "idle"]);
      same(timers.size, 0);
    }
  },

  async "tries come ever later, and what waits for them fails at last"() {
    const { server, timers, statuses, generation } = running({ maxTries: 6 });
    server.last.end(1006);
    for (let n = 0; n < 6; n += 1) {
      timers.pass(statuses.at(-1).delayMs);
      server.last.end(1006);
    }
    const delays = statuses.filter((s) => s.state === "waiting").map((s) => s.delayMs);
    same(delays, [500, 1000, 2000, 4000, 8000, 15_000]);
    same(statuses.at(-1).state, "idle");
    await generation.next();
    await raises(everstream.ConnectionLost, generation.next());
    const halves = running({ random: () => 0 });
    halves.server.last.end(1006);
    same(halves.statuses.at(-1).delayMs, 250);
  },

  async "a client that stays connected never stops to try"() {
    const { server, timers, statuses, client } = begin({ maxTries: 1 });
    client.connect();
    for (let n = 0; n < 9; n += 1) {
      server.last.end(1006);
      timers.pass(15_000);
    }
    same(server.sockets.length, 10);
    server.last.end(1006);
    client.connect(); // now, not later
    same(server.sockets.length, 11);
    server.last.open();
    same(statuses.at(-1).state, "open");
    client.close();
    same([timers.size, statuses.at(-1).state], [0, "idle"]);
  },

  async "a refused key is told and not tried again"() {
    const { server, timers, statuses, client } = begin();
    client.connect();
    const generation = client.complete("x");
    server.last.open();
    server.last.end(1008, "wrong key");
    await raises(everstream.AuthenticationError, generation.text());
    same([statuses.at(-1).state, statuses.at(-1).error.message], ["refused", "wrong key"]);
    same(timers.size, 0);
    client.apiKey = "other";
    client.connect();
    same(server.last.protocols[1], "everstream.key.b3RoZXI");
  },

  async "a message that is too large fails alone"() {
    const { server, timers, say, client, generation } = running();
    const large = client.complete("large");
    server.last.end(1009);
    await raises(everstream.ConnectionLost, large.text());
    timers.pass(500);
    server.last.open();
    say(resumed("r1", 1, 1, true), finished("r1", 2));
    same(seqs(await eventsOf(generation)), [1, 2]);
  },

  async "what migrates goes on over another socket while the rest ends in peace"() {
    const { server, timers, say, client, generation } = running();
    const unkept = client.complete("y");
    const slower = client.complete("z", { keep: true });
    const cut = client.complete("z", { keep: true });
    const [old] = server.sockets;
    say(started("r3"), started("r4"));
    say(started("r2"), { type: "migrate", request_id: "r1", ...PLACE, seq: 1, position: 1 });
    timers.pass(500);
    same(server.sockets.length, 2);
    server.last.open();
    same(server.last.sent[0].last_seq, 1);
    old.say({ type: "migrate", request_id: "r3", ...PLACE, seq: 0, position: 1 }, token("r2", 1));
    same(server.last.sent.at(-1).type, "resume");
    say(resumed("r1", 1, 1, true), token("r1", 2), finished("r1", 3));
    say(resumed("r2", 0, 0, true), finished("r2", 1));
    const ending = unkept.cancel();
    same(old.sent.at(-1), { type: "cancel", request_id: "r2" });
    old.say(finished("r2", 2));
    await ending;
    same(seqs(await eventsOf(generation)), [1, 2, 3]);
    same(seqs(await eventsOf(slower)), [1]);
    same(seqs(await eventsOf(unkept)), [1, 2]);
    old.end(1012);
    same(server.sockets.length, 2);
    same([server.last.sent.length, server.last.sent.at(-1).type], [3, "resume"]);
    say(finished("r3", 1));
    same(seqs(await eventsOf(cut)), [1]);
  },

  async "a request that a leaving server refuses goes to the next one"() {
    const { server, timers, say, client } = begin();
    const created = client.createSession();
    server.last.open();
    say(refusal("r1", 503, "draining"));
    timers.pass(500);
    server.last.open();
    say({ type: "created", request_id: "r1", ...PLACE, position: 0, state_bytes: 4 });
    same((await created).id, "sess_1");
  },

  async "what was not answered is sent again with its key"() {
    const { server, timers, say, client } = begin();
    const generation = client.session("sess_1").generate("x");
    const appended = client.session("sess_1").append("y");
    server.last.open();
    const [first] = server.sockets;
    server.last.end(1006);
    timers.pass(500);
    server.last.open();
    same(server.last.sent, first.sent);
    holds(first.sent[0].idempotency_key !== first.sent[1].idempotency_key, "keys differ");
    // The server has not noticed yet that the first reader is gone.
    say(refusal("r1", 409, "session_attached"), refusal("r2", 409, "key_in_use"));
    timers.pass(499);
    same(server.last.sent.length, 2);
    timers.pass(1);
    same(server.last.sent.slice(2).map(({ request_id, type }) => [request_id, type]), [
      ["r3", "generate"],
      ["r4", "append"],
    ]);
    say(resumed("r3", 4, 6, false), token("r3", 5), finished("r3", 6));
    say({ type: "appended", request_id: "r4", session: "sess_1", position: 2, usage: {} });
    same((await appended).position, 2);
    same(seqs(await eventsOf(generation)), [5, 6]);
  },

  async "a first refusal is the caller's"() {
    const { server, say, client } = begin();
    const appended = client.session("sess_1").append("y");
    const generation = client.session("sess_1").generate("y");
    server.last.open();
    say(refusal("r1", 429, "rate_limited", { retry_after_s: 2.5 }));
    const error = await raises(everstream.CapacityExhausted, appended);
    same([error.status, error.retryAfterS], [429, 2.5]);
    say(refusal("r2", 409, "session_busy"));
    await raises(everstream.SessionBusy, generation.text());
  },

  async "a server that always ends before it answers is given up"() {
    const { server, timers, client } = begin({ maxTries: 3 });
    const generation = client.complete("<crash>");
    for (let n = 0; n < 4; n += 1) {
      server.last.open();
      server.last.say({ type: "later" }); // it is there, so tries to connect begin anew
      server.last.end(1011);
      timers.pass(15_000);
    }
    await raises(everstream.ConnectionLost, generation.text());
    same(server.sockets.length, 4);
  },

  async "events are passed on once and never with a gap"() {
    const { say, server, generation } = running();
    say(token("r1", 1), token("r1", 2), token("r1", 4));
    same([(await generation.next()).value.seq, (await generation.next()).value.seq], [1, 2]);
    await raises(everstream.ProtocolError, generation.next());
    same(server.last.sent.at(-1), { type: "detach", request_id: "r1" });
  },

  async "a reset while it was away is told, and the present follows"() {
    const { server, timers, say, generation } = running();
    server.last.end(1012);
    timers.pass(500);
    server.last.open();
    say({ ...resumed("r1", 9, 9, true, "reset"), epoch: "e-1" }, token("r1", 10));
    const types = [];
    for (let n = 0; n < 3; n += 1) types.push((await generation.next()).value.type);
    same(types, ["token", "reset", "token"]);
    same(generation.cursor, { session: "sess_1", epoch: "e-1", last_seq: 10 });
    say(finished("r1", 11));
    same(seqs(await eventsOf(generation)), [11]);
  },

  async "a generation that ended while it was away leaves a later one alone"() {
    const { server, timers, say, generation } = running();
    server.last.end(1006);
    timers.pass(500);
    server.last.open();
    say(resumed("r1", 1, 4, true), token("r1", 2), finished("r1", 3), token("r1", 4));
    same(seqs(await eventsOf(generation)), [1, 2, 3]);
    same(server.last.sent.at(-1), { type: "detach", request_id: "r1" });
  },

  async "a log without the end of the generation is no silent end"() {
    for (const lastSeq of [1, 2]) {
      const { server, timers, say, generation } = running();
      server.last.end(1006);
      timers.pass(500);
      server.last.open();
      say(resumed("r1", 1, lastSeq, false), token("r1", 2));
      await raises(everstream.ProtocolError, eventsOf(generation));
    }
  },

  async "a failure of the server's is thrown after what came before"() {
    const { say, generation } = running();
    say(finished("r1", 2, "error", { error: "not finite" }));
    same(seqs([(await generation.next()).value, (await generation.next()).value]), [1, 2]);
    const error = await raises(everstream.InternalServerError, generation.next());
    same(error.message, "not finite");
  },

  async "an unread generation is left to the server and fetched later"() {
    const { server, say, generation } = running({ maxUnread: 4 });
    say(token("r1", 2), token("r1", 3), token("r1", 4), token("r1", 5));
    same(server.last.sent.at(-1), { type: "detach", request_id: "r1" });
    say({ type: "detached", request_id: "r1" }, token("r1", 6));
    await generation.next();
    same(server.last.sent.length, 2);
    await generation.next();
    const { type, last_seq, request_id } = server.last.sent.at(-1);
    same([type, last_seq, request_id], ["resume", 4, "r2"]);
    say(resumed("r2", 4, 6, true), token("r2", 5), token("r2", 6), finished("r2", 7));
    same(seqs(await eventsOf(generation)), [3, 4, 5, 6, 7]);
  },

  async "a long queue is read in order while it grows"() {
    const { say, generation } = running();
    for (let seq = 2; seq <= 10_000; seq += 1) say(token("r1", seq));
    for (let seq = 1; seq <= 9_999; seq += 1) same((await generation.next()).value.seq, seq);
    say(finished("r1", 10_001));
    same(seqs(await eventsOf(generation)), [10_000, 10_001]);
  },

  async "a silent socket is asked, and then replaced"() {
    const { server, timers, statuses } = running({ timeoutS: 60 });
    timers.pass(40_000);
    same(server.last.sent.at(-1).type, "probe");
    server.last.say(refusal("probe", 400, "invalid_value"));
    timers.pass(40_000);
    same([server.sockets.length, server.last.sent.length], [1, 3]);
    timers.pass(20_000);
    same(statuses.at(-1).reason, "nothing was heard");
    timers.pass(500);
    same(server.sockets.length, 2);
    timers.pass(41_000); // a handshake without an answer
    same(server.sockets.length, 3);
    const idle = begin();
    idle.client.connect();
    idle.server.last.open();
    idle.timers.pass(600_000);
    same([idle.server.sockets.length, idle.server.last.sent], [1, []]);
  },

  async "cancel and detach while away ask for no more than they need"() {
    const detached = running();
    detached.server.last.end(1006);
    await detached.generation.detach();
    detached.timers.pass(60_000);
    same(detached.server.last.sent.filter(({ type }) => type !== "generate"), []);

    const cancelled = running();
    cancelled.server.last.end(1006);
    const ending = cancelled.generation.cancel();
    cancelled.timers.pass(500);
    cancelled.server.last.open();
    cancelled.say(resumed("r1", 1, 1, true), finished("r1", 2, "cancelled"));
    same((await ending).finish_reason, "cancelled");
    same([...new Set(cancelled.server.last.sent.map(({ type }) => type))], ["resume", "cancel"]);

    const queued = begin();
    const waiting = queued.client.complete("x", { keep: true });
    queued.server.last.open();
    queued.server.last.end(1006);
    const over = waiting.cancel();
    queued.timers.pass(500);
    queued.server.last.open();
    same(queued.server.last.sent.map(({ type }) => type), ["generate", "cancel"]);
    queued.say(finished("r1", 0, "cancelled"));
    same((await over).seq, 0);

    const { server, client } = begin();
    const unsent = client.complete("x", { keep: true });
    same(await unsent.cancel(), null);
    server.last.open();
    same(server.last.sent, []);
    await raises(everstream.Cancelled, unsent.begun());
  },

  async "a frame that is not an event ends the socket"() {
    for (const frame of ["{", "3", "null", "{}"]) {
      const { server, generation } = running();
      server.last.raw(frame);
      await generation.next();
      await raises(everstream.ConnectionLost, generation.next());
    }
  },

  async "an error for no request in particular fails what was not answered"() {
    const { say, client, generation } = running();
    const unanswered = client.createSession();
    say(refusal(null, 400, "invalid_value"));
    await raises(everstream.InvalidRequest, unanswered);
    say(finished("r1", 2));
    same(seqs(await eventsOf(generation)), [1, 2]);
  },

  async "an answer over http says what went wrong"() {
    const answers = [];
    const fetch = async (url, options) => {
      if (answers.length === 0) throw new TypeError("no network");
      const [body, init] = answers.shift();
      holds(options.headers.Authorization === "Bearer k", "the key is sent");
      return new Response(body, init);
    };
    const { client } = begin({ fetch, apiKey: "k" });
    answers.push(['{"error": {"message": "no", "code": "x"}}', { status: 503, headers: { "Retry-After": "5" } }]);
    const full = await raises(everstream.CapacityExhausted, client.models());
    same([full.message, full.code, full.retryAfterS], ["no", "x", 5]);
    answers.push(["<html>", { status: 502, headers: { "Retry-After": "Tue, 1 Jan" } }]);
    const bad = await raises(everstream.InternalServerError, client.models());
    same([bad.status, bad.retryAfterS], [502, null]);
    answers.push(["<html>", { status: 200 }]);
    await raises(everstream.ProtocolError, client.models());
    await raises(everstream.ConnectionLost, client.models());
    same(await client.health(), false);
  },
};
