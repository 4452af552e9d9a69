// A chat that streams. The conversation exists in this page only.

import { ApiError, chat } from "./api.js";
import { byId, count, digits, duration, element, sentence, setText } from "./dom.js";

const EXAMPLES = ["What is the capital of France?", "Write three tips for a calm morning.", "Why is the sky blue?"];
const SENTENCE = /^[\s\S]*[.!?\n](?=\s|$)/;

const transcript = byId("transcript");
const spoken = byId("spoken");
const form = byId("composer");
const message = byId("message");
const send = byId("send");
const stop = byId("stop");

let conversation = [];
let running = null; // AbortController of the answer that streams
let onUnauthorized = () => {};

/** Start the chat. `unauthorized` is called if the gateway requires another key. */
export function startChat(unauthorized) {
  onUnauthorized = unauthorized;
  for (const text of EXAMPLES) {
    const button = element("button", "quiet", text);
    button.type = "button";
    button.addEventListener("click", () => ask(text));
    byId("examples").append(element("li", "", button));
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value.trim();
  if (!text || running) return;
  message.value = "";
  ask(text);
});

message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

stop.addEventListener("click", () => running?.abort());

byId("new-chat").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  for (const turn of transcript.querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
  message.focus();
});

async function ask(text) {
  if (running) return;
  const asked = conversation;
  asked.push({ role: "user", content: text });
  byId("welcome").hidden = true;
  addTurn("user", "You", text);
  const answer = new Answer();
  setRunning(new AbortController());
  try {
    for await (const chunk of chat({ messages: asked, ...options() }, running.signal)) answer.add(chunk);
    answer.finish();
  } catch (error) {
    answer.fail(error);
    if (error instanceof ApiError && error.status === 401) onUnauthorized(error.message);
  }
  setRunning(null);
  if (answer.text) asked.push({ role: "assistant", content: answer.text });
  else asked.pop(); // a conversation alternates between user and assistant
}

function options() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  return { temperature: number("temperature"), max_tokens: number("max-tokens") };
}

function setRunning(controller) {
  running = controller;
  const focused = document.activeElement === send || document.activeElement === stop;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  if (focused) (controller ? stop : message).focus();
}

function addTurn(role, name, text) {
  const content = element("div", "content", text);
  const turn = element("article", `turn ${role}`, element("h3", "unseen", name), content);
  transcript.append(turn);
  transcript.scrollTop = transcript.scrollHeight;
  return turn;
}

/** The answer that streams, with its figures as the browser measures them. */
class Answer {
  text = "";
  usage = null;
  reasoning = null;

  constructor() {
    this.began = performance.now();
    this.first = null;
    this.unspoken = "";
    this.turn = addTurn("assistant", "Model", "");
    this.content = this.turn.querySelector(".content");
    this.note = element("p", "small note", "Waiting for the first token");
    this.turn.append(this.note);
    this.turn.classList.add("streaming");
    spoken.replaceChildren();
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const { content: piece, reasoning_content: thought } = chunk.choices[0]?.delta ?? {};
    if (!piece && !thought) return;
    this.first ??= performance.now();
    const atEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 40;
    if (thought) this.think(thought);
    if (piece) {
      this.text += piece;
      this.content.append(piece);
      this.speak(piece);
    }
    setText(this.note, this.figures());
    if (atEnd) transcript.scrollTop = transcript.scrollHeight;
  }

  /** Show reasoning above the answer. It is not a part of later requests. */
  think(thought) {
    if (!this.reasoning) {
      this.reasoning = element("div", "reasoning");
      this.content.before(this.reasoning);
    }
    this.reasoning.append(thought);
  }

  /** Pass complete sentences to screen readers: single tokens would interrupt each other. */
  speak(piece, rest = false) {
    this.unspoken += piece;
    const ready = rest ? this.unspoken : this.unspoken.match(SENTENCE)?.[0];
    if (!ready?.trim()) return;
    this.unspoken = this.unspoken.slice(ready.length);
    spoken.append(element("span", "", ready));
  }

  finish() {
    this.end();
    setText(this.note, this.figures() || "The answer is empty.");
  }

  fail(error) {
    this.end();
    if (error.name === "AbortError") {
      setText(this.note, [this.figures(), "stopped"].filter(Boolean).join(" · "));
      return;
    }
    this.note.classList.add("problem");
    setText(this.note, error instanceof ApiError ? sentence(error.message) : "The gateway does not answer.");
    spoken.append(element("span", "", this.note.textContent));
  }

  end() {
    this.speak("", true);
    this.turn.classList.remove("streaming");
    this.ended = performance.now();
  }

  figures() {
    if (this.first === null) return "";
    const parts = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens) {
      parts.push(`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
      const seconds = (this.ended - this.first) / 1000;
      if (tokens > 1 && seconds > 0) parts.push(`${digits((tokens - 1) / seconds)} tokens/s`);
    }
    parts.push(`first token after ${duration((this.first - this.began) / 1000)}`);
    return parts.join(" · ");
  }
}
