// Clients for the scenarios, over the test's proxy, that come back at once and leave nothing behind.

import { Client } from "../../../clients/javascript/everstream.js";

const LONGEST_DELAY_MS = 15_000;

/** Delays between tries are nothing; the watch over silent sockets is left as it is. */
const timers = {
  setTimeout: (callback, ms) => setTimeout(callback, ms > LONGEST_DELAY_MS ? ms : 0),
  clearTimeout: (timer) => clearTimeout(timer),
};

let numCuts = 0;

/**
 * Runs a scenario and deletes every session that it left.
 * `url` is the proxy's, and `options` are what every client of this platform needs.
 */
export async function run(scenario, url, options) {
  const clients = [];
  const open = (path, more) => {
    const states = [];
    let wait;
    const waiting = new Promise((resolve) => (wait = resolve));
    const onStatus = ({ state }) => {
      states.push(state);
      if (state === "waiting") wait();
    };
    const client = new Client(url + path, { ...options, timers, onStatus, ...more });
    clients.push(client);
    return Object.assign(client, { states, waiting });
  };
  const connect = (more) => open("", more);
  const cut = (how, k, more) => open(`/cut/${how}/${k}/${++numCuts}`, more);
  try {
    await scenario({ connect, cut });
  } finally {
    const last = connect();
    for await (const session of last.sessions()) await session.delete().catch(() => {});
    for (const client of clients) client.close();
  }
}
