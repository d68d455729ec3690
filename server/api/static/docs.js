// The API's description, from /openapi.json. Text goes in as text, never as HTML.

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function resolve(api, schema) {
  if (!schema?.$ref) return schema ?? {};
  return schema.$ref.slice(2).split("/").reduce((part, key) => part[key], api);
}

function typeName(api, schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((part) => typeName(api, part)).join(" or ");
  if (schema.type === "array") return `list of ${typeName(api, schema.items ?? {})}`;
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  return schema.type ?? "any";
}

function bounds(schema) {
  const signs = {
    minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<",
    minLength: "length ≥", maxLength: "length ≤", minItems: "items ≥", maxItems: "items ≤",
  };
  const parts = [schema, ...(schema.anyOf ?? [])];
  return parts
    .flatMap((part) => Object.entries(signs).map(([key, sign]) => key in part && `${sign} ${part[key]}`))
    .filter(Boolean)
    .join(", ");
}

function fields(api, title, schema) {
  const { properties = {}, required = [] } = resolve(api, schema);
  const section = document.createDocumentFragment();
  if (!Object.keys(properties).length) return section;
  const table = element("table");
  for (const [name, property] of Object.entries(properties)) {
    const row = table.insertRow();
    row.append(element("td", name), element("td", typeName(api, property)));
    const note = [required.includes(name) ? "required" : "", bounds(property)];
    row.append(element("td", note.filter(Boolean).join(", "), "note"));
  }
  section.append(element("h2", title), table);
  return section;
}

function route(api, method, path, operation) {
  const made = element("details");
  const summary = element("summary");
  summary.append(element("span", method.toUpperCase(), "method"), element("code", path));
  made.append(summary, element("p", operation.description ?? operation.summary ?? ""));
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body) made.append(fields(api, "Body", body));
  const answer = operation.responses?.["200"]?.content?.["application/json"]?.schema;
  if (answer) made.append(fields(api, "Answer", answer));
  const others = Object.keys(operation.responses ?? {}).filter((status) => status !== "200");
  if (others.length) made.append(element("p", `Errors: ${others.join(", ")}`, "note"));
  return made;
}

async function show(target) {
  const response = await fetch("/openapi.json");
  if (!response.ok) {
    target.append(element("p", `The description could not be loaded (${response.status}).`));
    return;
  }
  const api = await response.json();
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      target.append(route(api, method, path, operation));
    }
  }
}

await show(document.getElementById("routes"));
