// The controls for sampling: what they show, and what they send.

/** The form's values as fields of a `generate`; a seed left empty is drawn by the server. */
export function readSampling(form) {
  const fields = {};
  for (const input of form.elements) {
    if (input.name && input.value !== "") fields[input.name] = Number(input.value);
  }
  return fields;
}

/** Keeps the number beside each slider equal to it, fills its track, and minds narrow screens. */
export function watchSampling(form, details) {
  const show = (input) => {
    const output = form.querySelector(`output[for="${input.id}"]`);
    if (!output) return;
    output.value = Number(input.value).toFixed(2);
    const share = (input.value - input.min) / (input.max - input.min);
    input.style.setProperty("--share", `${share * 100}%`);
  };
  for (const input of form.elements) show(input);
  form.addEventListener("input", ({ target }) => show(target));
  form.addEventListener("submit", (event) => event.preventDefault());
  if (matchMedia("(max-width: 60rem)").matches) details.open = false;
}
