// Calls of the gateway. The API key stays in the session storage of the tab, and is sent as header.

const STORED_AS = "headrace.key";

export const key = {
  get value() {
    return sessionStorage.getItem(STORED_AS) ?? "";
  },
  set value(text) {
    if (text) sessionStorage.setItem(STORED_AS, text);
    else sessionStorage.removeItem(STORED_AS);
  },
};

/** An answer with an error status. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options) {
  const headers = { ...options.headers };
  if (key.value) headers.authorization = `Bearer ${key.value}`;
  const response = await fetch(path, { ...options, headers, credentials: "omit" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `status ${response.status}`);
}

/** Return the state of the deployment. */
export async function readState(timeoutMs) {
  const response = await call("page/state", { signal: AbortSignal.timeout(timeoutMs) });
  return response.json();
}

/** Yield the chunks of a chat completion. */
export async function* chat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(0, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "the stream ended early");
}

/** Yield the data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffered += value;
      let end;
      while ((end = buffered.indexOf("\n\n")) >= 0) {
        const event = buffered.slice(0, end);
        buffered = buffered.slice(end + 2);
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
