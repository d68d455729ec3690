// What Node lacks before version 22: the `WebSocket` that browsers have.

import { createRequire } from "node:module";

const { WebSocket } = createRequire(
  new URL("../../../clients/javascript/package.json", import.meta.url),
)("ws");

export { WebSocket };
