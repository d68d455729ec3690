import { test } from "node:test";

import { scenarios } from "./stubbed.mjs";

for (const [name, scenario] of Object.entries(scenarios)) test(name, scenario);
