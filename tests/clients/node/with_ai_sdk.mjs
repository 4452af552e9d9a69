// The AI SDK of Vercel, with its providers for OpenAI and for servers of OpenAI's API.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

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

const compatible = createOpenAICompatible({
  name: "headrace",
  baseURL: `${URL}/v1`,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const settings = { temperature: 0, maxOutputTokens: 100, maxRetries: 0 };

async function ask(model) {
  const whole = await generateText({ model, prompt: QUESTION, ...settings });
  const stream = streamText({ model, prompt: QUESTION, ...settings });
  let streamed = "";
  for await (const text of stream.textStream) streamed += text;
  return { text: whole.text, streamed, tokens: whole.usage.totalTokens };
}

const chat = () => ask(compatible.chatModel(MODEL));
const openai_chat = () => ask(openai.chat(MODEL));
const responses = () => ask(openai(MODEL));

async function structured() {
  const answer = await generateText({
    model: compatible.chatModel(MODEL),
    prompt: SENTENCE,
    output: Output.object({ schema: Person }),
    ...settings,
  });
  return answer.output;
}

async function tools() {
  const messages = [];
  for (const city of ["Rome", "Oslo", "Lima"]) {
    const named = { toolCallId: city, toolName: "get_weather" };
    const output = { type: "text", value: `Sunny in ${city}.` };
    messages.push(
      { role: "user", content: `How is the weather in ${city}?` },
      { role: "assistant", content: [{ type: "tool-call", ...named, input: { city } }] },
      { role: "tool", content: [{ type: "tool-result", ...named, output }] },
      { role: "assistant", content: `It is sunny in ${city}.` },
    );
  }
  messages.push({ role: "user", content: "How is the weather in Paris?" });
  const answer = await generateText({
    model: compatible.chatModel(MODEL),
    messages,
    tools: {
      get_weather: tool({
        description: "Return the weather of a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => `Sunny in ${city}.`,
      }),
    },
    stopWhen: stepCountIs(2),
    ...settings,
  });
  return { answer: answer.text, calls: answer.steps[0].toolCalls.map((each) => each.input) };
}

async function retrieval() {
  const found = {};
  const models = {
    compatible: compatible.embeddingModel(ENCODER),
    openai: openai.embedding(ENCODER),
  };
  for (const [name, model] of Object.entries(models)) {
    const question = await embed({ model, value: ABOUT_TRAIN, maxRetries: 0 });
    const documents = await embedMany({ model, values: DOCUMENTS, maxRetries: 0 });
    found[name] = closest(question.embedding, documents.embeddings);
  }
  return found;
}

await run({ retrieval, chat, openai_chat, responses, structured, tools });
