// The page's address names its sessions, so that a reload, or somebody who gets the link, finds them.

const NAME = "sessions";
const ID = /^[\w-]{1,128}$/;

/**
 * "#sessions=ID,ID~ID:40": for each pane its session, then those that it is a copy of and the
 * positions at which the copies were made.
 */
export function addressOf(panes) {
  const named = panes.filter(({ session }) => session);
  const parts = named.map(({ session, lineage }) => [session.id, ...lineage.map(({ id, at }) => `${id}:${at}`)].join("~"));
  return parts.length ? `#${NAME}=${parts.join(",")}` : "";
}

/** What `addressOf` wrote: [{id, lineage}], without what is malformed. */
export function sessionsIn(hash) {
  if (!hash.startsWith(`#${NAME}=`)) return [];
  return hash
    .slice(NAME.length + 2)
    .split(",")
    .map((part) => {
      const [id, ...past] = part.split("~");
      const lineage = past.map((one) => ({ id: one.split(":")[0], at: Number(one.split(":")[1]) }));
      return { id, lineage };
    })
    .filter(({ id, lineage }) => ID.test(id) && lineage.every((past) => ID.test(past.id) && Number.isSafeInteger(past.at)));
}

/** Shows the address of these panes, without an entry in the browser's history. */
export function showAddress(panes) {
  const address = addressOf(panes);
  if (address !== location.hash) history.replaceState(null, "", address || location.pathname);
}
