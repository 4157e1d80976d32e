// Asks the gateway at argv[2] as an application with Vercel's AI SDK would. Prints what it got as one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({
  name: "headrace",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "any",
  includeUsage: true,
});
const request = { model: provider("smollm2"), prompt: "Hello", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

const whole = await generateText(request);
const streamed = streamText(request);
const pieces = [];
for await (const piece of streamed.textStream) pieces.push(piece);

const failure = await generateText({ ...request, model: provider("nobody") }).then(
  () => null,
  (error) => ({ status: error.statusCode, message: error.message, retryable: error.isRetryable }),
);

// A reader that leaves in the middle.
const abort = new AbortController();
let seen = 0;
const leaving = streamText({ ...request, maxOutputTokens: 4000, abortSignal: abort.signal, onError() {} });
for await (const _ of leaving.textStream) {
  if (++seen === 3) abort.abort();
}

console.log(
  JSON.stringify({
    whole: { text: whole.text, finish: whole.finishReason, usage: whole.usage },
    streamed: { text: pieces.join(""), pieces: pieces.length, finish: await streamed.finishReason, usage: await streamed.usage },
    failure,
    seen,
  }),
);
