// The API reference: renders the OpenAPI document of the gateway.

import { byId, element, sentence } from "./dom.js";

const BOUNDS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };
const SIZES = { maxLength: "characters", maxItems: "entries" };

try {
  const response = await fetch("../openapi.json", { credentials: "omit" });
  if (!response.ok) throw new Error(`status ${response.status}`);
  show(await response.json());
} catch (error) {
  byId("introduction").append(element("p", "problem", `openapi.json cannot be read: ${error.message}`));
}

function show({ info, paths, components: { schemas } }) {
  for (const text of info.description.split("\n\n")) byId("introduction").append(prose("p", text));
  const objects = new Map(); // by name, in the order of their use
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const title = `${method.toUpperCase()} ${path}`;
      const link = element("a", "", element("code", "", title));
      link.href = `#${operation.operationId}`;
      byId("contents").append(element("li", "", link));
      byId("operations").append(showOperation(title, operation, schemas, objects));
    }
  }
  byId("objects-title").hidden = objects.size === 0;
  for (const [name, schema] of objects) byId("objects").append(showObject(name, schema, schemas, objects));
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

function showOperation(title, operation, schemas, objects) {
  const section = element("section", "operation", element("h2", "", element("code", "", title)));
  section.id = operation.operationId;
  if (operation.description) section.append(prose("p", operation.description));
  const body = operation.requestBody;
  if (body) {
    const { schema } = body.content["application/json"];
    section.append(element("h3", "", "Request"), prose("p", body.description ?? ""));
    section.append(showFields(title, resolve(schema, schemas), schemas, objects));
  }
  section.append(element("h3", "", "Responses"), showResponses(title, operation.responses, schemas, objects));
  return section;
}

function showObject(name, schema, schemas, objects) {
  const section = element("section", "operation", element("h3", "", name));
  section.id = `object-${name}`;
  if (schema.description) section.append(prose("p", schema.description));
  section.append(showFields(name, schema, schemas, objects));
  return section;
}

/** Return a table of the fields, and one of those that are ignored or refused, which is closed. */
function showFields(owner, { properties = {}, required = [] }, schemas, objects) {
  const row = ([name, schema]) => {
    const cells = [element("td", "", element("code", "", name)), element("td", "", ...typeOf(schema, schemas, objects))];
    const notes = [sentence(schema.description ?? ""), required.includes(name) ? "Required." : defaultOf(schema)];
    return element("tr", "", ...cells, prose("td", notes.filter(Boolean).join(" ")));
  };
  const titles = ["Field", "Type", "Meaning"];
  const isOther = ([, schema]) => schema["x-supported"] === false;
  const [own, others] = [Object.entries(properties).filter((field) => !isOther(field)), Object.entries(properties).filter(isOther)];
  const tables = element("div", "", table(`Fields of ${owner}`, titles, own.map(row)));
  if (others.length) {
    const summary = element("summary", "", `${others.length} fields of other servers, which are ignored or refused`);
    tables.append(element("details", "", summary, table(`Other fields of ${owner}`, titles, others.map(row))));
  }
  return tables;
}

function showResponses(title, responses, schemas, objects) {
  const rows = Object.entries(responses).map(([status, { description, content = {} }]) => {
    const types = Object.entries(content).map(([media, { schema }]) =>
      media === "application/json" && schema ? typeOf(schema, schemas, objects) : [media],
    );
    const bodies = types.flatMap((nodes, at) => (at ? [" or ", ...nodes] : nodes));
    return element("tr", "", element("td", "", status), element("td", "", ...bodies), prose("td", description));
  });
  return table(`Responses of ${title}`, ["Status", "Body", "Meaning"], rows);
}

/** Return a table that scrolls on narrow screens. */
function table(label, titles, rows) {
  const heads = titles.map((title) => {
    const head = element("th", "", title);
    head.scope = "col";
    return head;
  });
  const made = element("table", "", element("thead", "", element("tr", "", ...heads)), element("tbody", "", ...rows));
  const scrolling = element("div", "scrolling", made);
  scrolling.tabIndex = 0;
  scrolling.role = "region";
  scrolling.ariaLabel = label;
  return scrolling;
}

/** Return the type of a schema as texts, and as links to the objects that it names. */
function typeOf(schema, schemas, objects) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    const target = resolve(schema, schemas);
    if (!target.properties) return typeOf(target, schemas, objects);
    objects.set(name, target);
    const link = element("a", "", name);
    link.href = `#object-${name}`;
    return [link];
  }
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) {
    return choices.flatMap((choice, at) => [...(at ? [" or "] : []), ...typeOf(choice, schemas, objects)]);
  }
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  const kind = schema.type === "array" ? ["list of ", ...typeOf(schema.items ?? {}, schemas, objects)] : [schema.type ?? "any"];
  // JavaScript's numbers do not represent larger integers exactly.
  const bounded = Object.entries(BOUNDS).filter(([name]) => Math.abs(schema[name]) <= Number.MAX_SAFE_INTEGER);
  const limits = bounded.map(([name, sign]) => `${sign} ${schema[name]}`);
  for (const [name, unit] of Object.entries(SIZES)) if (name in schema) limits.push(`at most ${schema[name]} ${unit}`);
  return limits.length ? [...kind, `, ${limits.join(", ")}`] : kind;
}

function resolve(schema, schemas) {
  return schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema;
}

function defaultOf(schema) {
  return schema.default === undefined || schema.default === null ? "" : `Default: \`${JSON.stringify(schema.default)}\`.`;
}

/** Return an element with a text whose words in backticks are code. */
function prose(tag, text) {
  return element(tag, "", ...text.split("`").map((part, at) => (at % 2 ? element("code", "", part) : part)));
}
