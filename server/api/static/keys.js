// The shortcuts of the whole page. With Alt, so that they never stand in the way of writing.

/** Calls `actions` by what is pressed; see the page's help, which lists them. */
export function watchKeys(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      actions.escape();
      return;
    }
    if (!event.altKey || event.ctrlKey || event.metaKey) return;
    const action = actionOf(event.code, actions); // the code: with Alt, some keys give letters
    if (!action) return;
    event.preventDefault();
    action();
  });
}

function actionOf(code, actions) {
  const digit = /^Digit([1-8])$/.exec(code);
  if (digit) return () => actions.goTo(digit[1] - 1);
  return { KeyN: actions.add, KeyX: actions.close, KeyC: actions.compare, KeyP: actions.unlikely, KeyT: actions.theme }[code];
}
