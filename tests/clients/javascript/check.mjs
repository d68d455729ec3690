// What the scenarios assert with, in Node and in the browser alike.

/** Fails unless both are the same as JSON. */
export function same(found, expected, what = "") {
  const [left, right] = [JSON.stringify(found), JSON.stringify(expected)];
  if (left !== right) throw new Error(`${what} found ${left}, expected ${right}`);
}

/** Fails unless `claim` holds. */
export function holds(claim, what) {
  if (!claim) throw new Error(`not so: ${what}`);
}

/** The error that a promise is rejected with; fails unless it is of this class. */
export async function raises(kind, promise) {
  let error = null;
  try {
    await promise;
  } catch (caught) {
    error = caught;
  }
  if (!(error instanceof kind)) throw new Error(`expected ${kind.name}, got ${error}`);
  return error;
}

/** All events of a generation. */
export async function eventsOf(generation) {
  const events = [];
  for await (const event of generation) events.push(event);
  return events;
}

/** The ids of a generation's tokens. */
export async function tokensOf(generation) {
  return (await eventsOf(generation)).filter((e) => e.type === "token").map((e) => e.token_id);
}

/** The numbers from `first` to `last`. */
export function range(first, last) {
  return Array.from({ length: last - first + 1 }, (_, i) => first + i);
}
