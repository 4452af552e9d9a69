// What the programs share: the deployment's address, and the call of one function by name.
import { z } from "zod";

export const URL = process.env.HEADRACE_URL;
export const MODEL = process.env.HEADRACE_MODEL;
export const ENCODER = process.env.HEADRACE_ENCODER;
export const KEY = "unused";

export const QUESTION = "What is the capital of France?";
export const DOCUMENTS = ["A cat hunts mice at night.", "The train leaves at nine.", "Paris is in France."];
export const ABOUT_TRAIN = "When does the railway connection depart?";
export const SENTENCE = "Extract the person: Anna is a child, 7 years old.";
export const Person = z.object({
  name: z.string(),
  age: z.number().int(),
  kind: z.enum(["adult", "child"]),
});

/** Return the index of the document whose embedding is closest to that of the question. */
export function closest(question, documents) {
  const products = documents.map((row) => row.reduce((sum, value, at) => sum + value * question[at], 0));
  return products.indexOf(Math.max(...products));
}

/** Call the function that the first argument names, and print its result as the last line. */
export async function run(functions) {
  const result = await functions[process.argv[2]]();
  console.log(`\n${JSON.stringify(result)}`);
}
