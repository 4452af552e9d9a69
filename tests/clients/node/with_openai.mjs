// OpenAI's package for Node.js.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";

import {
  ABOUT_TRAIN,
  DOCUMENTS,
  ENCODER,
  KEY,
  MODEL,
  Person,
  QUESTION,
  SENTENCE,
  URL,
  closest,
  run,
} from "./call.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });

async function chat() {
  const body = {
    model: MODEL,
    messages: [{ role: "user", content: QUESTION }],
    temperature: 0,
    max_completion_tokens: 30,
  };
  const whole = await client.chat.completions.create(body);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  return { text: whole.choices[0].message.content, streamed };
}

async function parse() {
  const answer = await client.chat.completions.parse({
    model: MODEL,
    messages: [{ role: "user", content: SENTENCE }],
    response_format: zodResponseFormat(Person, "person"),
    temperature: 0,
    max_tokens: 100,
  });
  return answer.choices[0].message.parsed;
}

async function tools() {
  const messages = [];
  for (const city of ["Rome", "Oslo", "Lima"]) {
    const called = { name: "get_weather", arguments: JSON.stringify({ city }) };
    messages.push(
      { role: "user", content: `How is the weather in ${city}?` },
      {
        role: "assistant",
        content: null,
        tool_calls: [{ id: city, type: "function", function: called }],
      },
      { role: "tool", tool_call_id: city, content: `Sunny in ${city}.` },
      { role: "assistant", content: `It is sunny in ${city}.` },
    );
  }
  messages.push({ role: "user", content: "How is the weather in Paris?" });
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages,
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "Return the weather of a city.",
          parameters: { type: "object", properties: { city: { type: "string" } } },
          parse: JSON.parse,
          function: ({ city }) => `Sunny in ${city}.`,
        },
      },
    ],
    temperature: 0,
    max_tokens: 60,
  });
  return { answer: await runner.finalContent(), messages: runner.messages.length };
}

async function errors() {
  try {
    await client.chat.completions.create({
      model: "another",
      messages: [{ role: "user", content: "Hi" }],
    });
  } catch (error) {
    return [error.constructor.name, error.code, error.param];
  }
}

async function responses() {
  const body = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 30 };
  const whole = await client.responses.create(body);
  let streamed = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  return { text: whole.output_text, streamed };
}

async function retrieval() {
  const input = [ABOUT_TRAIN, ...DOCUMENTS];
  const create = (more) => client.embeddings.create({ model: ENCODER, input, ...more });
  const rows = (answer) => answer.data.map((each) => Array.from(each.embedding));
  const [question, ...documents] = rows(await create({}));
  const [float] = rows(await create({ encoding_format: "float" }));
  const [short] = rows(await create({ dimensions: 64 }));
  return {
    best: closest(question, documents),
    difference: Math.max(...question.map((value, at) => Math.abs(value - float[at]))),
    dimensions: [question.length, short.length],
  };
}

await run({ retrieval, chat, parse, tools, errors, responses });
