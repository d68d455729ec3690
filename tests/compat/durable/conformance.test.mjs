// The conformance suite of the protocol, through the adapter. What of it is run: conformance.txt.
import { afterAll } from "vitest";
import { runConformanceTests } from "@durable-streams/server-conformance-tests";

import { adapter } from "./adapter.mjs";

await new Promise((listening) => adapter.listen(0, "127.0.0.1", listening));
afterAll(() => {
  adapter.closeAllConnections();
  adapter.close();
});

runConformanceTests({ baseUrl: `http://127.0.0.1:${adapter.address().port}` });
