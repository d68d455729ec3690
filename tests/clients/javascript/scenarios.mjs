// What the client promises of a real server, in Node and in Chromium alike.
//
// Each scenario gets `connect(options)`, which gives a client, and `cut(how, k, options)`, which
// gives one whose connections are reset after k frames of the server: the "first", or "each".

import * as everstream from "../../../clients/javascript/everstream.js";
import { eventsOf, holds, raises, range, same, tokensOf } from "./check.mjs";

const FOR_EVER = { max_tokens: 1_000_000, ignore_eos: true };
const some = (max_tokens, seed = 1) => ({ max_tokens, seed, ignore_eos: true });

export const scenarios = {
  async "a completion streams its tokens and ends"({ connect }) {
    const client = connect();
    const generation = client.complete("Once", some(12));
    const begun = await generation.begun();
    same([begun.type, begun.seed, begun.seq], ["started", 1, 0]);
    const events = await eventsOf(generation);
    same(events.map((event) => event.seq), range(1, 13));
    same(events.map((event) => event.type), [...Array(12).fill("token"), "finished"]);
    same(events.at(-1), generation.finished);
    same(generation.finished.finish_reason, "length");
    same(generation.cursor, { session: begun.session, epoch: begun.epoch, last_seq: 13 });
    const text = await client.complete("Once", some(12)).text();
    same(text, events.map((event) => event.text).join(""));
  },

  async "tokens have their probabilities where they are asked for"({ connect }) {
    const options = { ...some(4), temperature: 0, top_logprobs: 2 };
    const events = await eventsOf(connect().complete("Once", options));
    for (const { logprob, token_id, top_logprobs } of events.slice(0, 4)) {
      same([top_logprobs.length, top_logprobs[0]], [2, { token_id, logprob }]);
      holds(logprob < 0 && top_logprobs[1].logprob <= logprob, "best first");
    }
  },

  async "many generations share one socket"({ connect }) {
    const client = connect();
    const seeds = range(1, 8);
    const texts = (n) => client.complete("Once", some(15, n)).text();
    const together = await Promise.all(seeds.map(texts));
    const alone = [];
    for (const seed of seeds) alone.push(await texts(seed));
    same(together, alone);
    holds(new Set(together).size > 1, "seeds give different texts");
    same(client.states.filter((state) => state === "open").length, 1);
  },

  async "a session begins with a named state"({ connect }) {
    const client = connect();
    const session = await client.createSession();
    await session.append("Once upon a time there was a wood.");
    const wanted = await tokensOf(session.generate("", some(9)));
    const begun = await client.createSession({ state: "wood" });
    same(await tokensOf(begun.generate("", some(9))), wanted);
    same(await tokensOf(client.complete("", { ...some(9), state: "wood" })), wanted);
    const error = await raises(everstream.NotFound, client.createSession({ state: "nowhere" }));
    same(error.code, "state_not_found");
  },

  async "a prompt continues a prefix by its handle"({ connect }) {
    const client = connect();
    const [prompt, more] = ["There was a wood. ".repeat(8), " Then came the fox."];
    const wanted = await tokensOf(client.complete(prompt + more, some(9)));
    const first = client.complete(prompt, { ...some(4), return_prefix: true });
    await first.text();
    const prefix = first.finished.prefix;
    same(await tokensOf(client.complete(more, { ...some(9), prefix })), wanted);
    const unknown = client.complete("", { ...some(4), prefix: `prefix_${"A".repeat(48)}` });
    const error = await raises(everstream.PrefixNotFound, unknown.text());
    same(error.code, "prefix_not_found");
  },

  async "a session lives until it is deleted"({ connect }) {
    const session = await connect().createSession();
    const appended = await session.append("Once upon a time", { logprobs: true });
    holds(appended.logprobs.length > 0, "probabilities were asked for");
    const generation = session.generate("", some(4));
    await generation.text();
    same(generation.session, session.id);
    const info = await session.info();
    same([info.position, info.busy], [generation.finished.position, false]);
    await session.delete();
    const error = await raises(everstream.SessionNotFound, session.info());
    holds(error instanceof everstream.NotFound, "it is a NotFound as well");
    same([error.code, error.status], ["session_not_found", 404]);
    await raises(everstream.SessionNotFound, session.append("more"));
    await raises(everstream.SessionNotFound, session.delete());
  },

  async "forks, rewinds and copies go on as the session would"({ connect }) {
    const client = connect();
    const session = await client.createSession();
    await session.append([10, 20, 30]);
    const tokens = await tokensOf(session.generate("", some(9)));
    const early = await session.fork(2, 3);
    const copy = await client.importSession(await early[0].export());
    const before = await session.info();
    const rewound = await session.rewind(3);
    same([rewound.position, rewound.seq], [3, before.seq]);
    holds(rewound.epoch !== before.epoch, "another epoch");
    for (const one of [session, copy, ...early]) {
      same(await tokensOf(one.generate("", some(9))), tokens);
    }
    const ids = [];
    for await (const one of client.sessions(2)) ids.push(one.id);
    for (const one of [session, copy, ...early]) holds(ids.includes(one.id), "it is listed");
    await raises(everstream.InvalidRequest, client.importSession(new Uint8Array([1, 2])));
  },

  async "leaving a loop cancels, and the session is free at once"({ connect }) {
    const session = await connect().createSession();
    const generation = session.generate("Once", FOR_EVER);
    for await (const event of generation) {
      same(event.seq, 1);
      break;
    }
    same(generation.finished.finish_reason, "cancelled");
    same((await tokensOf(session.generate("", some(3)))).length, 3);
  },

  async "a signal ends the loop at once and cancels"({ connect }) {
    const client = connect();
    const session = await client.createSession();
    const abort = new AbortController();
    const generation = session.generate("Once", { ...FOR_EVER, signal: abort.signal });
    await generation.next();
    const reading = eventsOf(generation);
    abort.abort(new RangeError("enough"));
    await raises(RangeError, reading);
    while ((await session.info()).busy); // ends with the step that is under way
    const late = client.complete("Once", { ...FOR_EVER, signal: abort.signal });
    await raises(RangeError, late.text());
  },

  async "cancel leaves what came to the reader"({ connect }) {
    const generation = connect().complete("Once", FOR_EVER);
    const reading = eventsOf(generation);
    await generation.begun();
    const finished = await generation.cancel();
    const events = await reading;
    same(events.at(-1), finished);
    same(finished.finish_reason, "cancelled");
    same(events.map((event) => event.seq), range(1, finished.seq));
    same(await generation.cancel(), finished);
  },

  async "what is detached is read on from its cursor"({ connect }) {
    const client = connect();
    const session = await client.createSession();
    const generation = session.generate([1, 2], some(30));
    const { value: first } = await generation.next();
    await generation.detach();
    same((await eventsOf(generation)).length, 0);
    same(generation.cursor.last_seq, 1);
    const rest = await eventsOf(client.resume(session.id, generation.cursor));
    same(rest.map((event) => event.seq), range(2, 31));
    await session.rewind(2);
    const again = await eventsOf(session.generate([], some(30)));
    const ids = (events) => events.map((event) => event.token_id);
    same(ids([first, ...rest]), ids(again));
  },

  async "all that a session has said can be read again"({ connect }) {
    const client = connect();
    const session = await client.createSession();
    await session.append([1, 2]);
    const tokens = [];
    for (const n of [3, 4]) tokens.push(...(await tokensOf(session.generate("", some(n)))));
    const events = await eventsOf(client.resume(session.id, { last_seq: 0 }));
    same(events.map((event) => event.seq), range(1, 9));
    same(events.filter((e) => e.type === "token").map((e) => e.token_id), tokens);
    same(await eventsOf(client.resume(session.id, { last_seq: 9 })), []);
  },

  async "a reset is an event, and an error where text is wanted"({ connect }) {
    const client = connect();
    const session = await client.createSession();
    const generation = session.generate([1, 2, 3], some(4));
    await generation.text();
    const { epoch } = await session.rewind(3);
    const resumed = client.resume(session.id, { ...generation.cursor });
    const [reset, ...others] = await eventsOf(resumed);
    same([reset.type, reset.epoch, reset.seq, others], ["reset", epoch, 5, []]);
    same(resumed.cursor, { session: session.id, epoch, last_seq: 5 });
    const error = await raises(
      everstream.SessionReset,
      client.resume(session.id, { ...generation.cursor }).text(),
    );
    same([error.session, error.epoch, error.last_seq], [session.id, epoch, 5]);
    const more = await tokensOf(session.generate("", some(2)));
    same(await tokensOf(client.resume(session.id, error)), more);
  },

  async "a second reader must say that it takes over"({ connect }) {
    // A reader that falls too far behind detaches, and the session is free for the next one.
    const [one, other] = [connect({ maxUnread: Infinity }), connect({ maxUnread: Infinity })];
    const session = await one.createSession();
    const generation = session.generate([1], FOR_EVER);
    await generation.next();
    await raises(everstream.SessionAttached, other.resume(session.id, { last_seq: 0 }).text());
    const taken = other.resume(session.id, { last_seq: 0, take_over: true });
    await raises(everstream.SessionAttached, eventsOf(generation));
    same((await taken.next()).value.seq, 1);
    await raises(everstream.SessionBusy, session.rewind(0));
    await taken.return();
    same((await session.info()).busy, false);
  },

  async "work under a key is done once"({ connect }) {
    const client = connect();
    const session = await client.createSession();
    const found = [];
    for (const key of ["a", "a"]) {
      const idempotency_key = `${session.id}-${key}`;
      const appended = await session.append([1, 2], { idempotency_key });
      const options = { ...some(6), idempotency_key: `${idempotency_key}-g` };
      found.push([appended.position, await session.generate("", options).text()]);
    }
    same(found[0], found[1]);
    same((await session.info()).seq, 7);
  },

  async "errors say what was wrong"({ connect }) {
    const client = connect();
    const refused = await raises(
      everstream.InvalidRequest,
      client.complete("x", { min_p: 2 }).text(),
    );
    same([refused.param, refused.code, refused.status], ["min_p", "invalid_value", 400]);
    const far = await raises(
      everstream.InvalidRequest,
      client.complete("x", { top_n_sigma: 101 }).text(),
    );
    same([far.param, far.code, far.status], ["top_n_sigma", "invalid_value", 400]);
    const greedy = await client.complete("x", { temperature: 0, max_tokens: 9 }).text();
    same(await client.complete("x", { top_n_sigma: 1e-6, max_tokens: 9 }).text(), greedy);
    for (const wrong of [NaN, -Infinity, 10n, () => 1]) {
      const unsaid = client.complete("x", { temperature: wrong });
      const error = await raises(everstream.InvalidRequest, unsaid.text());
      same([error.param, error.name], ["temperature", "InvalidRequest"]);
    }
    const unknown = client.complete("x", { no_such_field: 1 });
    same((await raises(everstream.InvalidRequest, unknown.begun())).param, "no_such_field");
    holds((await client.models())[0].everstream.state_bytes_per_session > 0, "models are told");
    same(await client.health(), true);
  },

  async "closing ends what still runs"({ connect }) {
    const client = connect();
    const generation = client.complete("Once", FOR_EVER);
    await generation.next();
    client.close();
    await raises(everstream.ConnectionLost, eventsOf(generation));
    await raises(everstream.ConnectionLost, client.complete("Once").text());
  },

  async "a slow reader of a kept session misses nothing"({ connect }) {
    const client = connect({ maxUnread: 8 });
    const session = await client.createSession();
    const generation = session.generate([1, 2], some(60));
    await generation.begun();
    while (!(await session.info()).parked && (await session.info()).busy);
    const events = await eventsOf(generation);
    same(events.map((event) => event.seq), range(1, 61));
    same(generation.finished.finish_reason, "length");
  },

  async "a slow reader of a session that is not kept is told"({ connect }) {
    const client = connect({ maxUnread: 8 });
    const generation = client.complete("Once", FOR_EVER);
    await generation.begun();
    // Each of these takes a step of the server, in which the other one gets a token as well.
    for (let n = 0; n < 20; n += 1) await client.complete("Once", some(1)).text();
    const seqs = [];
    const reading = async () => {
      for await (const event of generation) seqs.push(event.seq);
    };
    await raises(everstream.ReaderTooSlow, reading());
    same(seqs, range(1, 8));
  },

  async "a connection cut at any event loses and repeats nothing"({ connect, cut }) {
    const whole = await eventsOf(connect().complete([1, 2], some(20)));
    const ids = (events) => events.map((event) => [event.seq, event.token_id, event.text]);
    for (const k of range(0, 23)) {
      const generation = cut("first", k).complete([1, 2], { ...some(20), keep: true });
      const events = await eventsOf(generation);
      same(ids(events), ids(whole), `cut after ${k} frames`);
      same(generation.cursor.last_seq, 21);
      await connect().session(generation.session).delete();
    }
  },

  async "connections that are cut again and again end up whole"({ connect, cut }) {
    const whole = await eventsOf(connect().complete([1, 2], some(20)));
    for (const k of [2, 3, 5]) {
      const generation = cut("each", k).complete([1, 2], { ...some(20), keep: true });
      const events = await eventsOf(generation);
      same(events.map((e) => e.token_id), whole.map((e) => e.token_id), `cut after each ${k}`);
      await connect().session(generation.session).delete();
    }
  },

  async "a session's own generation survives a cut at any event"({ connect, cut }) {
    const session = await connect().createSession();
    await session.append([1, 2]);
    const whole = await tokensOf(session.generate("", some(6)));
    for (const k of range(0, 8)) {
      await session.rewind(2);
      const again = cut("first", k).session(session.id);
      same(await tokensOf(again.generate("", some(6))), whole, `cut after ${k} frames`);
    }
  },

  async "a resumed reader survives a cut at any event"({ connect, cut }) {
    const session = await connect().createSession();
    for (const n of [3, 4]) await session.generate([n], some(n)).text();
    for (const k of range(0, 10)) {
      const events = await eventsOf(cut("first", k).resume(session.id, { last_seq: 0 }));
      same(events.map((event) => event.seq), range(1, 9), `cut after ${k} frames`);
    }
  },

  async "requests with one answer are asked again and done once"({ connect, cut }) {
    const { id } = await cut("first", 0).createSession();
    const session = connect().session(id);
    await cut("first", 0).session(id).append([1, 2, 3]);
    same((await session.info()).position, 3);
    const [{ id: forked }] = await cut("first", 0).session(id).fork();
    same((await cut("first", 0).session(id).rewind(2)).position, 2);
    await cut("first", 0).session(forked).delete();
    await raises(everstream.SessionNotFound, connect().session(forked).info());
  },

  async "a generation that keeps nothing fails with its connection once it has begun"({ cut }) {
    same((await tokensOf(cut("first", 0).complete("Once", some(5)))).length, 5);
    for (const k of range(1, 5)) {
      const generation = cut("first", k).complete("Once", some(5));
      const seqs = [];
      const reading = async () => {
        for await (const event of generation) seqs.push(event.seq);
      };
      await raises(everstream.ConnectionLost, reading());
      same(seqs, range(1, k - 1), `cut after ${k} frames`);
    }
  },

  async "a client that is told not to retry does not"({ cut }) {
    const client = cut("first", 2, { maxTries: 0 });
    const generation = client.complete("Once", { ...some(5), keep: true });
    await raises(everstream.ConnectionLost, eventsOf(generation));
    same(generation.cursor.last_seq, 1);
    const rest = await eventsOf(client.resume(generation.session, generation.cursor));
    same(rest.map((event) => event.seq), range(2, 6));
  },

  async "what was cancelled while the connection was away ends"({ cut, connect }) {
    const session = await connect().createSession();
    const client = cut("first", 3);
    const generation = client.session(session.id).generate([1], FOR_EVER);
    await generation.begun();
    await client.waiting;
    const finished = await generation.cancel();
    same(finished.finish_reason, "cancelled");
    same((await session.info()).busy, false);
  },
};
