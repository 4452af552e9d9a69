// What the programs share: the deployment's address, and the call of one function by name.
import { z } from "zod";

export const URL = process.env.HEADRACE_URL;
export const MODEL = process.env.HEADRACE_MODEL;
export const KEY = "unused";

export const QUESTION = "What is the capital of France?";
export const SENTENCE = "Extract the person: Anna is a child, 7 years old.";
export const Person = z.object({
  name: z.string(),
  age: z.number().int(),
  kind: z.enum(["adult", "child"]),
});

/** Call the function that the first argument names, and print its result as the last line. */
export async function run(functions) {
  const result = await functions[process.argv[2]]();
  console.log(`\n${JSON.stringify(result)}`);
}
