// The topology: router, workers with their KV as a water level, and the channel between them.

import { Smoothed, byId, bytes, count, element, reducedMotion, setText, svg, synchronize, whole } from "./dom.js";

export const STATES = {
  not_ready: "not ready", suspect: "no heartbeat received", probation: "paused after a failure",
  unmatched: "no compatible partner",
};
const COMPACT = 6; // workers of a role from which each gets one line
const INSET = 56; // length of the curves into and out of the channel, px

const rates = new Map(); // bytes/s on the wire, by worker
const map = byId("map");
const lines = byId("lines");
const banks = { prefill: byId("prefill"), decode: byId("decode") };

/** Return the KV formats of workers, without repetitions. */
export function formatsOf(workers) {
  return [...new Set(workers.map(formatOf).filter(Boolean))].sort();
}

function formatOf({ kv_format: name, kv_eviction: evicted }) {
  return name && evicted ? `${name} (${whole(100 * evicted)} % evicted)` : name;
}

/** Show the workers of a state and the smoothed flow of KV between them. */
export function showFlow(state, flow) {
  const by = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });
  const prefill = state.workers.filter((w) => w.role === "prefill").sort(by);
  const decode = state.workers.filter((w) => w.role !== "prefill").sort(by);
  const names = new Set(state.workers.map((w) => w.name));
  for (const name of rates.keys()) if (!names.has(name)) rates.delete(name);
  const mixed = formatsOf(state.workers).length > 1;
  showBank(banks.prefill, prefill, mixed);
  showBank(banks.decode, decode, mixed);
  const colocated = prefill.length === 0 && decode.length > 0;
  map.classList.toggle("colocated", colocated);
  setText(byId("decode-title"), colocated ? "Workers" : "Decode");
  showRouter(state);
  showChannel(state, flow);
  const hidden = state.workers_total - state.workers.length;
  byId("more-workers").hidden = hidden === 0;
  setText(byId("more-workers"), `${count(hidden)} more workers are not shown.`);
  draw();
  pace(flow.wire);
}

function showRouter({ router, queue_tokens: tokens }) {
  byId("router").dataset.state = router ? "ready" : "failed";
  setText(byId("router-waiting"), router ? count(router.waiting) : "–");
  setText(byId("router-text"), router ? `waiting · ${count(tokens)} tokens queued` : "no answer");
}

function showChannel(state, flow) {
  const moved = state.kv.wire_bytes > 0;
  setText(byId("channel-rate"), moved || flow.wire ? `${bytes(flow.wire)}/s` : "no KV sent yet");
  const ratio = flow.ratio === null ? "" : `${flow.ratio.toFixed(2)} : 1`;
  setText(byId("channel-ratio"), ratio && `${ratio} · ${bytes(state.kv.wire_bytes)} sent`);
}

function showBank(bank, workers, mixed) {
  bank.classList.toggle("compact", workers.length > COMPACT);
  bank.dataset.empty = String(workers.length === 0);
  const update = (item, worker) => updateWorker(item, worker, mixed);
  synchronize(bank.querySelector("ul"), workers, (w) => w.name, makeWorker, update);
}

function makeWorker() {
  const level = element("div", "level");
  const box = { viewBox: "0 0 96 6", preserveAspectRatio: "none" };
  const wave = svg("svg", { ...box, "aria-hidden": "true" });
  wave.append(svg("path", { d: "M0 4Q6 0 12 3T24 3T36 3T48 3T60 3T72 3T84 3T96 4V6H0Z" }));
  level.append(wave);
  const usage = element("p", "usage", element("span", "number"), element("span", "label", " of KV cache"));
  const [state, load] = [element("p", "state small"), element("p", "load small")];
  return element("li", "node worker", level, element("h4"), state, usage, load);
}

function updateWorker(item, worker, mixed) {
  item.dataset.state = worker.state === "ready" ? "ready" : "failed";
  item.classList.toggle("busy", worker.queue_tokens > 0);
  if (!rates.has(worker.name)) rates.set(worker.name, new Smoothed());
  item.dataset.wire = rates.get(worker.name).update(worker.wire_s);
  const find = (name) => item.querySelector(name);
  setText(find("h4"), worker.name);
  const notes = [];
  if (worker.role === "colocated") notes.push("prefill and decode");
  if (worker.state !== "ready") notes.push(STATES[worker.state] ?? worker.state);
  if (mixed) notes.push(`KV format ${formatOf(worker)}`);
  setText(find(".state"), notes.join(" · "));
  setText(find(".usage .number"), `${Number((100 * worker.kv_usage).toFixed(1))} %`);
  const load = [`${count(worker.queue_tokens)} tokens queued`];
  if (worker.running) load.push(`${count(worker.running)} running`);
  if (worker.waiting) load.push(`${count(worker.waiting)} waiting`);
  setText(find(".load"), load.join(" · "));
  find(".level").style.setProperty("--usage", `${(100 * worker.kv_usage).toFixed(1)}%`);
}

// Lines between the nodes, from their positions on the page.

const bed = svg("g", { class: "bed" });
const water = svg("g", { class: "water" });
const calls = svg("g", { class: "calls" });
lines.append(calls, bed, water);

function draw() {
  const frame = map.getBoundingClientRect();
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  const at = (node) => {
    const box = node.getBoundingClientRect();
    const [left, right] = [box.left - frame.left, box.right - frame.left];
    const [top, bottom] = [box.top - frame.top, box.bottom - frame.top];
    return { left, right, top, bottom, x: (left + right) / 2, y: (top + bottom) / 2 };
  };
  const channel = at(byId("channel"));
  const upright = at(banks.decode).top > channel.top; // on a narrow screen
  const workers = (bank) => [...bank.querySelectorAll("li")].map((item) => ({ ...at(item), wire: Number(item.dataset.wire) }));
  const sides = { prefill: workers(banks.prefill), decode: workers(banks.decode) };
  const paths = sides.prefill.length && sides.decode.length ? streams(sides, channel, upright) : [];
  for (const group of [bed, water]) {
    synchronize(group, paths, (p) => p.key, () => svg("path"), (path, p) => {
      path.setAttribute("d", p.d);
      path.setAttribute("class", p.flows ? "flows" : "still");
    });
  }
  const placed = upright ? [] : placements(at(byId("router")), sides);
  synchronize(calls, placed, (p) => p.key, () => svg("path"), (path, p) => path.setAttribute("d", p.d));
}

/** Paths of the KV: from each prefill worker into the channel, and from there to each decode worker. */
function streams({ prefill, decode }, channel, upright) {
  const { x, y, left, right, top, bottom } = channel;
  const start = upright ? { x, y: top + INSET * 0.7 } : { x: left + INSET, y };
  const end = upright ? { x, y: bottom - INSET * 0.7 } : { x: right - INSET, y };
  const bend = (a, b) => {
    const middle = upright ? (a.y + b.y) / 2 : (a.x + b.x) / 2;
    const handles = upright ? `${a.x} ${middle} ${b.x} ${middle}` : `${middle} ${a.y} ${middle} ${b.y}`;
    return `M${a.x} ${a.y}C${handles} ${b.x} ${b.y}`;
  };
  const out = (n) => (upright ? { x: n.x, y: n.bottom } : { x: n.right, y: n.y });
  const into = (n) => (upright ? { x: n.x, y: n.top } : { x: n.left, y: n.y });
  return [
    ...prefill.map((n, i) => ({ key: `p${i}`, d: bend(out(n), start), flows: n.wire > 0 })),
    { key: "trunk", d: `M${start.x} ${start.y}L${end.x} ${end.y}`, flows: true },
    ...decode.map((n, i) => ({ key: `d${i}`, d: bend(end, into(n)), flows: n.wire > 0 })),
  ];
}

/** Paths of the placements: from the router to both banks. */
function placements(router, sides) {
  const found = [];
  const left = sides.prefill[0];
  const right = sides.decode[0];
  if (left) found.push({ key: "p", d: `M${router.left} ${router.y}L${left.right + 2} ${router.y}` });
  if (right) found.push({ key: "d", d: `M${router.right} ${router.y}L${right.left - 2} ${router.y}` });
  return found;
}

new ResizeObserver(draw).observe(map);

// Motion: the faster the transfer, the faster the droplets.

let speed = 0;
let offset = 0;
let last = null;

function pace(rate) {
  speed = rate > 0 ? Math.min(260, 24 + 36 * Math.log10(1 + rate / 1e4)) : 0;
  map.classList.toggle("running", speed > 0);
  if (speed && last === null && !reducedMotion.matches) {
    last = performance.now();
    requestAnimationFrame(step);
  }
}

function step(now) {
  if (!speed || reducedMotion.matches) {
    last = null;
    return;
  }
  offset = (offset + (speed * (now - last)) / 1000) % 1800;
  last = now;
  water.style.setProperty("stroke-dashoffset", `${-offset}px`);
  requestAnimationFrame(step);
}
