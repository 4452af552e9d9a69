// The base URL of the API and example code, each with a button that copies it.

import { byId, setText } from "./dom.js";

const QUESTION = "What is the capital of France? Answer with one word.";
const COPIED_MS = 2000;

const base = new URL("v1", document.baseURI).href;
setText(byId("base-url"), base);

/** Show example code for the served model: a chat, or embeddings if it is an encoder. */
export function showConnection({ model, gateway: { requires_key: requiresKey } }) {
  const show = model.generates ? [pythonChat, curlChat] : [pythonEmbeddings, curlEmbeddings];
  setText(byId("python"), python(show[0](model.name), requiresKey));
  setText(byId("curl"), show[1](model.name, requiresKey));
}

function python(call, requiresKey) {
  const key = requiresKey ? 'os.environ["HEADRACE_API_KEY"]' : '"unused"';
  return `${requiresKey ? "import os\n\n" : ""}from openai import OpenAI  # pip install openai

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})
${call}`;
}

function pythonChat(model) {
  return `answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[{"role": "user", "content": ${JSON.stringify(QUESTION)}}],
    temperature=0,
)
print(answer.choices[0].message.content)`;
}

function pythonEmbeddings(model) {
  return `answer = client.embeddings.create(
    model=${JSON.stringify(model)},
    input=[${JSON.stringify(QUESTION)}],
)
print(answer.data[0].embedding)`;
}

function curlChat(model, requiresKey) {
  const body = `{
    "model": ${JSON.stringify(model)},
    "messages": [{"role": "user", "content": ${JSON.stringify(QUESTION)}}],
    "temperature": 0
  }`;
  return curl("chat/completions", body, requiresKey);
}

function curlEmbeddings(model, requiresKey) {
  const body = `{"model": ${JSON.stringify(model)}, "input": [${JSON.stringify(QUESTION)}]}`;
  return curl("embeddings", body, requiresKey);
}

function curl(path, body, requiresKey) {
  const key = requiresKey ? '  -H "Authorization: Bearer $HEADRACE_API_KEY" \\\n' : "";
  return `curl ${quote(`${base}/${path}`)} \\
${key}  -H 'Content-Type: application/json' \\
  -d ${quote(body)}`;
}

/** Return a text as one word of a shell. */
function quote(text) {
  return `'${text.replaceAll("'", String.raw`'\''`)}'`;
}

byId("show-code").addEventListener("click", ({ currentTarget }) => {
  const shown = byId("code").hidden;
  byId("code").hidden = !shown;
  currentTarget.setAttribute("aria-expanded", String(shown));
});

for (const button of document.querySelectorAll("[data-copies]")) {
  const label = button.firstChild;
  button.addEventListener("click", async () => {
    label.data = (await copy(byId(button.dataset.copies))) ? "Copied" : "Selected";
    setText(byId("announcer"), label.data);
    setTimeout(() => (label.data = "Copy"), COPIED_MS);
  });
}

/** Copy the text of an element, or select it where a page may not copy: browsers require HTTPS. */
async function copy(source) {
  try {
    await navigator.clipboard.writeText(source.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(source);
    return document.execCommand("copy");
  }
}
