// The row of figures, each with its course over the last minute.

import { Smoothed, byId, bytes, count, digits, duration, element, setText, svg, whole } from "./dom.js";

const SAMPLES = 60;
const SHOWN_SHARE = 0.2; // of the KV sent uncompressed, from which the reason is shown

class Figure {
  constructor(list, label) {
    this.samples = [];
    this.value = element("span", "number", "–");
    this.unit = element("span", "unit");
    this.note = element("span");
    this.line = svg("polyline");
    this.area = svg("polygon");
    const box = { viewBox: `0 0 ${SAMPLES - 1} 20`, preserveAspectRatio: "none" };
    const course = svg("svg", { ...box, "aria-hidden": "true" });
    course.append(this.area, this.line);
    const value = element("dd", "", this.value, this.unit);
    const more = element("dd", "small", this.note, course);
    list.append(element("div", "figure", element("dt", "", label), value, more));
  }

  show(text, unit, note, sample) {
    setText(this.value, text);
    setText(this.unit, unit);
    setText(this.note, note);
    this.samples.push(sample ?? 0);
    if (this.samples.length > SAMPLES) this.samples.shift();
    const top = Math.max(...this.samples, Number.EPSILON);
    const from = SAMPLES - this.samples.length;
    const points = this.samples.map((y, at) => `${from + at},${(19 - 17 * (y / top)).toFixed(2)}`).join(" ");
    this.line.setAttribute("points", points);
    this.area.setAttribute("points", `${from},20 ${points} ${SAMPLES - 1},20`);
  }
}

/** Figures of all gateways that answered lately. */
class Gateways {
  last = new Map();

  update({ id, at_s: at, generation_tokens: tokens, running }) {
    const before = this.last.get(id);
    const elapsed = before ? at - before.at : 0;
    const rate = elapsed > 0 ? Math.max(0, (tokens - before.tokens) / elapsed) : 0;
    const now = performance.now();
    this.last.set(id, { at, tokens, running, rate, seen: now });
    for (const [other, { seen }] of this.last) if (now - seen > 10_000) this.last.delete(other);
  }

  sum(name) {
    return [...this.last.values()].reduce((total, gateway) => total + gateway[name], 0);
  }
}

const list = byId("figures");
const output = new Figure(list, "Output");
const running = new Figure(list, "In progress");
const firstToken = new Figure(list, "Time to first token");
const wire = new Figure(list, "KV transfer");
const ratio = new Figure(list, "Compression");
const gateways = new Gateways();
const smoothed = { tokens: new Smoothed(), raw: new Smoothed(), wire: new Smoothed() };

/** Show a state, and return the smoothed transfer rate and compression ratio. */
export function showFigures(state, requests) {
  gateways.update(state.gateway);
  showOutput();
  showRunning(state.router?.waiting ?? 0);
  showFirstToken([...requests.running, ...requests.ended]);
  return showTransfers(state.kv);
}

function showOutput() {
  const rate = smoothed.tokens.update(gateways.sum("rate"));
  output.show(digits(rate), "tokens/s", `${count(gateways.sum("tokens"))} tokens so far`, rate);
}

function showRunning(waiting) {
  const requests = gateways.sum("running");
  const note = waiting ? `${count(waiting)} waiting for a worker` : "none waiting";
  running.show(count(requests), requests === 1 ? "request" : "requests", note, requests);
}

function showFirstToken(requests) {
  const times = requests.map((r) => r.first_token_s).filter((seconds) => seconds !== null);
  if (!times.length) {
    firstToken.show("–", "", "no requests yet", 0);
    return;
  }
  const median = times.sort((a, b) => a - b)[times.length >> 1];
  firstToken.show(...duration(median).split(" "), `median of ${times.length} ${times.length === 1 ? "request" : "requests"}`, median);
}

function showTransfers(kv) {
  const rates = { raw: smoothed.raw.update(kv.raw_s), wire: smoothed.wire.update(kv.wire_s) };
  const [rate, unit] = bytes(rates.wire).split(" ");
  wire.show(rate, `${unit}/s`, `${bytes(kv.wire_bytes)} sent so far`, rates.wire);
  if (!kv.wire_bytes) {
    ratio.show("–", "", "no KV sent yet", 0);
    return { wire: 0, ratio: null };
  }
  const now = rates.wire ? rates.raw / rates.wire : kv.raw_bytes / kv.wire_bytes;
  ratio.show(now.toFixed(2), ": 1", explainRatio(kv), now);
  return { wire: rates.wire, ratio: now };
}

/** Return why KV is compressed this much. */
function explainRatio({ raw_bytes: raw, wire_bytes: sent, faster_raw_share: share, compressible }) {
  if (!compressible) return "compression is off";
  if (share >= SHOWN_SHARE) return `${whole(100 * share)} % sent uncompressed: faster on this link`;
  return raw > sent ? `${bytes(raw - sent)} saved` : "nothing saved";
}
