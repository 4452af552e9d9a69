// Requests, each with the timeline of its stages. Refusals of one kind share a line.

import { byId, count, duration, element, setText, synchronize } from "./dom.js";

const STAGES = {
  receive: "Receive",
  route: "Wait for workers",
  queue: "Prefill queue",
  prefill: "Prefill",
  transfer: "KV transfer",
  decode: "Decode",
  failed: "Failed attempt",
};
const UNPLACED = {
  overloaded: ["refused", "The queue was full. Clients were asked to try again later (status 429)."],
  unavailable: ["refused", "No worker was ready (status 503)."],
  context_length_exceeded: ["refused", "Too long for the KV cache of the workers (status 400)."],
  queue_timeout: ["timed out", "Waited too long for a worker (status 408)."],
  deadline_exceeded: ["timed out", "The deadline passed before a worker was free (status 504)."],
  cancelled: ["cancelled", "The client disconnected before a worker was free."],
};
const SHOWN = 12;
const KEPT_S = 30; // time for which requests of a gateway that no longer answers are shown

export const NO_REQUESTS = { running: [], more: 0, unplaced: [], ended: [] };

const list = byId("requests");
const gateways = new Map(); // requests by the id of the gateway: several may answer in turn

byId("legend").append(
  ...Object.entries(STAGES)
    .filter(([stage]) => stage !== "failed")
    .map(([stage, name]) => element("li", stage, name)),
);

/** Add the requests of a state to those of other gateways, and return all. */
export function mergeRequests({ gateway: { id }, requests }) {
  const now = Date.now() / 1000;
  const known = (r) => ({ ...r, key: `${id}-${r.number}`, arrived: now - r.age_s });
  gateways.set(id, {
    ...requests,
    seen: now,
    running: requests.running.map(known),
    ended: requests.ended.map(known),
  });
  for (const [other, { seen }] of gateways) if (now - seen > KEPT_S) gateways.delete(other);
  const all = (name) => [...gateways.values()].flatMap((gateway) => gateway[name]);
  const running = all("running").sort((a, b) => a.arrived - b.arrived).slice(0, SHOWN);
  return {
    running,
    more: all("running_total").reduce((sum, n) => sum + n, 0) - running.length,
    unplaced: mergeGroups(all("unplaced")),
    ended: all("ended").sort((a, b) => b.arrived - a.arrived).slice(0, SHOWN),
  };
}

/** Return one group of unplaced requests for each status. */
function mergeGroups(groups) {
  const merged = new Map();
  for (const group of groups) {
    const other = merged.get(group.status);
    if (!other) {
      merged.set(group.status, group);
      continue;
    }
    const [latest, earlier] = group.last_s < other.last_s ? [group, other] : [other, group];
    const since_s = Math.max(group.since_s, other.since_s);
    merged.set(group.status, { ...latest, since_s, count: latest.count + earlier.count });
  }
  return [...merged.values()];
}

/** Forget all requests: another key has others. */
export function forgetRequests() {
  gateways.clear();
}

/** Show requests: running ones first, then a line for each kind of refusal, then ended ones. */
export function showRequests({ running, more, unplaced, ended }) {
  const further = more > 0 ? [{ key: "more", more }] : [];
  const groups = unplaced.map((group) => ({ key: `group-${group.status}`, group }));
  const rows = [...running, ...further, ...groups, ...ended];
  byId("no-requests").hidden = rows.length > 0;
  byId("columns").hidden = rows.length === 0;
  // Each group has a scale of its own: one long request would make the others invisible.
  const longest = (group) => Math.max(...group.map((r) => r.total_s), 0.001);
  const scale = { running: longest(running), ended: longest(ended) };
  synchronize(list, rows, (row) => row.key, make, (item, row) => {
    if (row.more) setText(item, `${count(row.more)} more in progress`);
    else if (row.group) updateGroup(item, row.group);
    else update(item, row, row.status === "running" ? scale.running : scale.ended);
  });
}

function make(row) {
  if (row.more) return element("li", "more small");
  const summary = element("summary");
  const columns = row.group ? ["state", "tokens", "why", "total"] : ["state", "tokens", "path", "bar", "total"];
  for (const name of columns) summary.append(element("span", name), " ");
  if (!row.group) {
    summary.querySelector(".tokens").before(element("span", "unseen", "prompt and output tokens "));
    summary.querySelector(".bar").setAttribute("aria-hidden", "true");
  }
  return element("li", "request", element("details", "", summary, element("dl", "stages")));
}

function update(item, request, longest) {
  const find = (name) => item.querySelector(`.${name}`);
  const [state, text] = stateOf(request);
  item.dataset.state = state;
  setText(find("state"), text);
  setText(find("tokens"), `${count(request.prompt_tokens)} → ${count(request.output_tokens)}`);
  setText(find("path"), pathOf(request));
  setText(find("total"), duration(request.total_s));
  const place = (bar, { stage, start, seconds }) => {
    bar.style.setProperty("left", `${(100 * start) / longest}%`);
    bar.style.setProperty("width", `${(100 * seconds) / longest}%`);
    bar.title = `${STAGES[stage]} ${duration(seconds)}`;
  };
  synchronize(find("bar"), stretches(request), (s) => s.key, (s) => element("i", s.stage), place);
  if (item.firstChild.open) showDetails(item, details(request));
}

/** Return the state of a request as the page's style names it, and as text. */
function stateOf({ status, decode }) {
  if (status === "running") return decode ? ["running", "running"] : ["waiting", "waiting"];
  return status === "ok" ? ["ok", "done"] : ["failed", status.replaceAll("_", " ")];
}

function updateGroup(item, { status, count: number, since_s: since, last_s: last, newest }) {
  const find = (name) => item.querySelector(`.${name}`);
  const [text, why] = UNPLACED[status] ?? ["failed", `Ended with the error ${status}.`];
  item.dataset.state = "failed";
  setText(find("state"), text);
  setText(find("tokens"), `${count(number)} ${number === 1 ? "request" : "requests"}`);
  setText(find("why"), why);
  setText(find("total"), ago(last));
  if (!item.firstChild.open) return;
  const rows = number === 1 ? [] : [["First request", ago(since)]];
  rows.push(["Last request", ago(last)], ["Duration of the last", duration(newest.total_s)]);
  rows.push(["Last request id", newest.id]);
  if (newest.trace) rows.push(["Last trace id", newest.trace]);
  showDetails(item, rows);
}

function ago(seconds) {
  return seconds < 99.5 ? `${count(seconds)} s ago` : `${count(seconds / 60)} min ago`;
}

function showDetails(item, rows) {
  synchronize(item.querySelector(".stages"), rows, ([name]) => name, makeDetail, updateDetail);
}

function pathOf({ prefill, decode }) {
  if (prefill) return `${prefill} → ${decode}`;
  return decode ?? "waiting for workers";
}

/** Return the stages of a request with keys: a stage occurs once for each attempt. */
function stretches(request) {
  return request.stages.map(([stage, start, seconds], at) => ({ key: `${at}-${stage}`, stage, start, seconds }));
}

function details(request) {
  const sums = new Map();
  for (const [stage, , seconds] of request.stages) sums.set(stage, (sums.get(stage) ?? 0) + seconds);
  const found = [...sums].map(([stage, seconds]) => [STAGES[stage], duration(seconds), stage]);
  if (request.read_s) found.push(["KV reads", duration(request.read_s)]);
  if (request.verify_s) found.push(["KV verification", duration(request.verify_s)]);
  if (request.first_token_s !== null) found.push(["First token after", duration(request.first_token_s)]);
  if (request.cached_tokens) found.push(["Cached prompt tokens", count(request.cached_tokens)]);
  if (request.choices > 1) found.push(["Choices", count(request.choices)]);
  if (request.attempts > 1) found.push(["Attempts", count(request.attempts)]);
  if (request.failures.length) found.push(["Failures", request.failures.join(", ")]);
  if (request.decode) found.push(["Workers", pathOf(request)]);
  found.push(["Request id", request.id]);
  if (request.trace) found.push(["Trace id", request.trace]);
  return found;
}

function makeDetail([name, , stage]) {
  return element("div", stage ?? "", element("dt", "", name), element("dd"));
}

function updateDetail(row, [, value]) {
  setText(row.lastChild, value);
}

// Opening shows the stages at once, not with the next state.
list.addEventListener("toggle", () => document.dispatchEvent(new Event("refresh")), true);
