// The controls for sampling: what they show, and what they send.

/** The form's values as fields of a `generate`; what is left out is the server's default. */
export function readSampling(form) {
  const fields = {};
  for (const input of form.elements) {
    const isDefault = input.type === "range" && !input.dataset.set;
    if (input.name && input.value !== "" && !isDefault) fields[input.name] = Number(input.value);
  }
  const stop = form.querySelector("#stop-texts").value.split("\n").filter(Boolean);
  // A line end cannot be written in a line of its own.
  if (stop.length) fields.stop = stop.map((text) => text.replaceAll("\\n", "\n"));
  return fields;
}

/** The sampling of the pane at `index` where several begin at once: no two get the same seed. */
export function samplingOf(fields, index) {
  if (fields.seed === undefined || index === 0) return fields;
  return { ...fields, seed: fields.seed + index };
}

/** Shows the server's defaults, but where the reader has set something else. */
export function showDefaults(form, defaults) {
  for (const input of form.elements) {
    if (input.type !== "range" || input.dataset.set) continue;
    input.value = defaults[input.name];
    showValue(form, input);
  }
}

/** Keeps the number next to each slider equal to it, fills its track, and minds narrow screens. */
export function watchSampling(form, details) {
  for (const input of form.elements) showValue(form, input);
  form.addEventListener("input", ({ target }) => {
    target.dataset.set = "true";
    showValue(form, target);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  if (matchMedia("(max-width: 60rem)").matches) details.open = false;
}

function showValue(form, input) {
  const output = form.querySelector(`output[for="${input.id}"]`);
  if (!output) return;
  output.value = Number(input.value).toFixed(2);
  const share = (input.value - input.min) / (input.max - input.min);
  input.style.setProperty("--share", `${share * 100}%`);
}
