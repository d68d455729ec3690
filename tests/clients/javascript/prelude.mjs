// Gives the README's examples what Node lacks before version 22.

import { WebSocket } from "./platform.mjs";

globalThis.WebSocket ??= WebSocket;
