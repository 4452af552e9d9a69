// Recent requests, each with the timeline of its stages.

import { byId, count, duration, element, setText, synchronize } from "./dom.js";

const STAGES = {
  receive: "Receive",
  route: "Route",
  queue: "Queue",
  prefill: "Prefill",
  transfer: "Transfer",
  decode: "Decode",
  failed: "Failed attempt",
};
const SHOWN = 16;
const KEPT_S = 30; // time for which requests of a gateway that no longer answers are shown

const list = byId("requests");
const gateways = new Map(); // requests by the id of the gateway: several may answer in turn

byId("legend").append(
  ...Object.entries(STAGES)
    .filter(([stage]) => stage !== "failed")
    .map(([stage, name]) => element("li", stage, name)),
);

/** Add the requests of a state to those of other gateways, and return the newest, newest first. */
export function mergeRequests({ gateway: { id }, requests }) {
  const now = Date.now() / 1000;
  const known = requests.map((r) => ({ ...r, key: `${id}-${r.number}`, arrived: now - r.age_s }));
  gateways.set(id, { seen: now, requests: known });
  for (const [other, { seen }] of gateways) if (now - seen > KEPT_S) gateways.delete(other);
  const all = [...gateways.values()].flatMap((gateway) => gateway.requests);
  return all.sort((a, b) => b.arrived - a.arrived).slice(0, SHOWN);
}

/** Forget all requests: another key has others. */
export function forgetRequests() {
  gateways.clear();
}

/** Show requests. */
export function showRequests(requests) {
  byId("no-requests").hidden = requests.length > 0;
  const longest = Math.max(...requests.map((r) => r.total_s), 0.001);
  synchronize(list, requests, (r) => r.key, make, (item, request) => update(item, request, longest));
}

function make() {
  const summary = element("summary");
  for (const name of ["state", "tokens", "path", "bar", "total"]) summary.append(element("span", name), " ");
  summary.querySelector(".tokens").before(element("span", "unseen", "prompt and output tokens "));
  summary.querySelector(".bar").setAttribute("aria-hidden", "true");
  return element("li", "request", element("details", "", summary, element("dl", "stages")));
}

function update(item, request, longest) {
  const find = (name) => item.querySelector(`.${name}`);
  const state = request.status === "running" || request.status === "ok" ? request.status : "failed";
  item.dataset.state = state;
  setText(find("state"), request.status === "ok" ? "done" : request.status.replaceAll("_", " "));
  setText(find("tokens"), `${count(request.prompt_tokens)} → ${count(request.output_tokens)}`);
  find("tokens").title = "Prompt tokens → output tokens";
  setText(find("path"), pathOf(request));
  setText(find("total"), duration(request.total_s));
  const place = (bar, { stage, start, seconds }) => {
    bar.style.setProperty("left", `${(100 * start) / longest}%`);
    bar.style.setProperty("width", `${(100 * seconds) / longest}%`);
    bar.title = `${STAGES[stage]} ${duration(seconds)}`;
  };
  synchronize(find("bar"), stretches(request), (s) => s.key, (s) => element("i", s.stage), place);
  if (item.firstChild.open) synchronize(find("stages"), rows(request), ([name]) => name, makeRow, updateRow);
}

function pathOf({ prefill, decode }) {
  if (prefill) return `${prefill} → ${decode}`;
  return decode ?? "waiting for workers";
}

/** Return the stages of a request with keys: a stage occurs once for each attempt. */
function stretches(request) {
  return request.stages.map(([stage, start, seconds], at) => ({ key: `${at}-${stage}`, stage, start, seconds }));
}

function rows(request) {
  const sums = new Map();
  for (const [stage, , seconds] of request.stages) sums.set(stage, (sums.get(stage) ?? 0) + seconds);
  const found = [...sums].map(([stage, seconds]) => [STAGES[stage], duration(seconds), stage]);
  if (request.read_s) found.push(["KV reads", duration(request.read_s)]);
  if (request.verify_s) found.push(["KV verification", duration(request.verify_s)]);
  if (request.first_token_s !== null) found.push(["First token after", duration(request.first_token_s)]);
  if (request.choices > 1) found.push(["Choices", count(request.choices)]);
  if (request.attempts > 1) found.push(["Attempts", count(request.attempts)]);
  if (request.failures.length) found.push(["Failures", request.failures.join(", ")]);
  found.push(["Workers", pathOf(request)], ["Request id", request.id]);
  if (request.trace) found.push(["Trace id", request.trace]);
  return found;
}

function makeRow([name, , stage]) {
  return element("div", stage ?? "", element("dt", "", name), element("dd"));
}

function updateRow(row, [, value]) {
  setText(row.lastChild, value);
}

// Opening shows the stages at once, not with the next state.
list.addEventListener("toggle", () => document.dispatchEvent(new Event("refresh")), true);
