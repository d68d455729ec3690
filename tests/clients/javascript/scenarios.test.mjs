import { test } from "node:test";

import { WebSocket } from "./platform.mjs";
import { scenarios } from "./scenarios.mjs";
import { run } from "./world.mjs";

const LIMIT = { timeout: 240_000 };

for (const [name, scenario] of Object.entries(scenarios)) {
  test(name, LIMIT, () => run(scenario, process.env.EVERSTREAM_PROXY, { WebSocket }));
}
