// What OpenAI's client for Node gets from a server. Usage: node checks.mjs BASE_URL MODEL; prints one JSON object.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three primes." }];
const parameters = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "describe", description: "Describe.", parameters } }];
const found = {};

const plain = await client.chat.completions.create({ model, messages });
found.plain = plain.choices[0].message.content;

found.streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
}

const helper = client.chat.completions.stream({ model, messages });
found.helped = await helper.finalContent();

const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required" });
const [call] = called.choices[0].message.tool_calls;
found.tool = { name: call.function.name, arguments: JSON.parse(call.function.arguments) };

const streamedCall = client.chat.completions.stream({ model, messages, tools });
const last = await streamedCall.finalMessage();
found.streamedTool = {
  name: last.tool_calls[0].function.name,
  arguments: JSON.parse(last.tool_calls[0].function.arguments),
};
const answer = { role: "tool", tool_call_id: last.tool_calls[0].id, content: "done" };
const answered = await client.chat.completions.create({ model, messages: [...messages, last, answer], tools });
found.answered = answered.choices[0].message.content;

const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema: parameters } };
const parsed = await client.chat.completions.parse({ model, messages, response_format });
found.json = JSON.parse(parsed.choices[0].message.content);

const text = await client.completions.create({ model, prompt: "a", max_tokens: 64 });
found.completion = text.choices[0].text;
found.streamedCompletion = "";
for await (const chunk of await client.completions.create({ model, prompt: "a", max_tokens: 64, stream: true })) {
  found.streamedCompletion += chunk.choices[0]?.text ?? "";
}

const response = await client.responses.create({ model, input: "Name three primes." });
found.response = response.output_text;
const stream = client.responses.stream({ model, input: "Name three primes." });
found.streamedResponse = (await stream.finalResponse()).output_text;

const format = { type: "json_schema", name: "person", strict: true, schema: parameters };
const responseJson = await client.responses.parse({ model, input: "Describe Ann.", text: { format } });
found.responseJson = JSON.parse(responseJson.output_text);

found.models = [];
for await (const one of client.models.list()) found.models.push(one.id);
found.model = (await client.models.retrieve(model)).id;

try {
  await client.chat.completions.create({ model: "nope", messages });
} catch (error) {
  found.refused = { status: error.status, code: error.code, isNotFound: error instanceof OpenAI.NotFoundError };
}

console.log(JSON.stringify(found));
