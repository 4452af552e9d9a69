// The live page: reads the state of the deployment once per second, and shows it.

import { ApiError, key, readState } from "./api.js";
import { startChat } from "./chat.js";
import { showConnection } from "./connect.js";
import { byId, count, sentence, setText } from "./dom.js";
import { showEncoder } from "./encoders.js";
import { showFigures } from "./figures.js";
import { formatsOf, showFlow } from "./flow.js";
import { NO_REQUESTS, forgetRequests, mergeRequests, showRequests } from "./requests.js";

const PERIOD_MS = 1000;
const MAX_PERIOD_MS = 8000;
const TIMEOUT_MS = 8000;

const dialog = byId("key-dialog");
let requests = NO_REQUESTS;
let failures = 0;
let timer = null;
let reading = false;
let dismissed = false; // the dialog for the key was closed without one

async function refresh() {
  clearTimeout(timer);
  if (reading || document.hidden || dialog.open || dismissed) return;
  reading = true;
  try {
    show(await readState(TIMEOUT_MS));
    failures = 0;
  } catch (error) {
    failures += 1;
    if (error instanceof ApiError && error.status === 401) requireKey(key.value ? error.message : "");
    else showProblem(error instanceof ApiError ? error.message : "The gateway does not answer.");
  } finally {
    reading = false;
  }
  timer = setTimeout(refresh, Math.min(MAX_PERIOD_MS, PERIOD_MS * 2 ** failures));
}

function show(state) {
  setText(byId("model"), describeModel(state));
  setText(byId("version"), state.gateway.version);
  byId("metrics-link").hidden = !state.gateway.serves_metrics;
  showConnection(state);
  setReadiness(state.not_ready ? "failed" : "ready", state.not_ready ? "Not ready" : "Ready");
  setProblem(sentence(state.not_ready ?? ""));
  byId("key-button").hidden = !key.value;
  requests = mergeRequests(state);
  showEncoder(state);
  showFlow(state, showFigures(state, requests));
  showRequests(requests);
}

function describeModel({ model: { name, context_length: context, generates }, encoder, workers }) {
  const parts = [generates && encoder ? `${name} and ${encoder.name}` : name];
  if (context !== null) parts.push(`context ${count(context)} tokens`);
  const formats = formatsOf(workers);
  if (formats.length) parts.push(`KV format ${formats.join(" and ")}`);
  return parts.join(" · ");
}

function showProblem(message) {
  setReadiness("failed", "No data");
  setProblem(`${sentence(message)} Trying again.`);
}

function setReadiness(state, text) {
  const shown = byId("readiness");
  shown.dataset.state = state;
  if (shown.textContent === text) return;
  setText(shown, text);
  setText(byId("announcer"), `Deployment: ${text}`);
}

function setProblem(message) {
  byId("problem").hidden = !message;
  setText(byId("problem"), message);
}

function requireKey(message) {
  setText(byId("key-problem"), sentence(message));
  byId("key-problem").hidden = !message;
  byId("forget-key").hidden = !key.value;
  setReadiness("failed", "Key needed");
  if (!dialog.open) dialog.showModal();
  byId("key").focus();
}

function useKey(value) {
  key.value = value;
  dismissed = false;
  forgetRequests();
  byId("key").value = "";
  dialog.close();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
});
byId("forget-key").addEventListener("click", () => useKey(""));
byId("key-button").addEventListener("click", () => requireKey(""));
dialog.addEventListener("cancel", () => {
  dismissed = !key.value;
  byId("key-button").hidden = false;
});
dialog.addEventListener("close", () => {
  failures = 0;
  refresh();
});
document.addEventListener("visibilitychange", refresh);
document.addEventListener("refresh", () => showRequests(requests));

startChat(requireKey);
refresh();
