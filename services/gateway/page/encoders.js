// The workers of the encoder, which computes embeddings and scores.

import { byId, count, element, setText, synchronize } from "./dom.js";
import { STATES } from "./flow.js";

const bank = byId("encoders");

/** Show the encoder of a state; hide what only a model that generates text has, if there is none. */
export function showEncoder({ model, encoder }) {
  for (const name of ["flow-section", "chat-section"]) byId(name).hidden = !model.generates;
  document.body.classList.toggle("no-chat", !model.generates);
  document.body.classList.toggle("with-encoder", Boolean(encoder));
  byId("encoder-section").hidden = !encoder;
  if (!encoder) return;
  const parts = [encoder.name];
  if (encoder.max_tokens !== null) parts.push(`up to ${count(encoder.max_tokens)} tokens`);
  if (encoder.router_waiting) parts.push(`${count(encoder.router_waiting)} requests waiting for a worker`);
  setText(byId("encoder-summary"), parts.join(" · "));
  const by = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });
  synchronize(bank.querySelector("ul"), [...encoder.workers].sort(by), (w) => w.name, makeWorker, updateWorker);
  const hidden = encoder.workers_total - encoder.workers.length;
  byId("more-encoders").hidden = hidden === 0;
  setText(byId("more-encoders"), `${count(hidden)} more workers are not shown.`);
}

function makeWorker() {
  const rate = element("p", "usage", element("span", "number"), element("span", "label", " tokens/s lately"));
  return element("li", "node worker", element("h4"), element("p", "state small"), rate, element("p", "load small"));
}

function updateWorker(item, worker) {
  item.dataset.state = worker.state === "ready" ? "ready" : "failed";
  item.classList.toggle("busy", worker.queue_tokens > 0);
  const find = (name) => item.querySelector(name);
  setText(find("h4"), worker.name);
  setText(find(".state"), worker.state === "ready" ? "" : (STATES[worker.state] ?? worker.state));
  setText(find(".usage .number"), worker.tokens_s ? count(worker.tokens_s) : "–");
  const load = [`${count(worker.queue_tokens)} tokens queued`];
  if (worker.running) load.push(`${count(worker.running)} running`);
  if (worker.waiting) load.push(`${count(worker.waiting)} waiting`);
  setText(find(".load"), load.join(" · "));
}
