// Requests to this page's server. On 401 the page prompts for the token; other errors become an ApiError with the server's message.

const TOKEN = "retro-token";

/** An error with the server's message. `status` is 0 if the server did not answer. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** @param {string} path relative to the page @param {AbortSignal} [signal] @returns {Promise<any>} */
export const get = async (path, signal) => (await request(path, { signal })).json();

/** @param {string} path @param {object} body @param {AbortSignal} [signal] @returns {Promise<any>} */
export const post = async (path, body, signal) => (await send(path, body, signal)).json();

/**
 * Yield the events of a stream as they arrive. Throws if the stream contains an error.
 *
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<{text: string, finish_reason: null | "stop" | "length"}>}
 */
export async function* stream(path, body, signal) {
  const response = await send(path, body, signal);
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, { status: response.status, code: event.error.code });
    yield event;
  }
  throw new ApiError("The server ended the stream early.");
}

let datastore = null;
const waiting = [];

/** The answer of GET /datastore. It is requested again until it succeeds once. @returns {Promise<any>} */
export function served() {
  datastore ??= get("datastore").then(
    (answer) => {
      for (const use of waiting.splice(0)) use(answer);
      return answer;
    },
    (error) => {
      datastore = null;
      throw error;
    },
  );
  return datastore;
}

/**
 * Call `use` with the answer of GET /datastore. If that request fails, it is repeated after the server's next answer.
 *
 * @param {(answer: any) => void} use
 */
export const whenServed = (use) => served().then(use, () => waiting.push(use));

function send(path, body, signal) {
  return request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
}

async function request(path, options) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    const headers = { ...options.headers, ...(token && { authorization: `Bearer ${token}` }) };
    const response = await reach(path, { ...options, headers });
    if (response.ok && waiting.length) served().catch(() => {});
    if (response.status !== 401) return response.ok ? response : Promise.reject(await errorOf(response));
    // Another request may have set a token while this one was under way.
    if (token === sessionStorage.getItem(TOKEN) && !(await askToken(Boolean(token)))) throw await errorOf(response);
    options.signal?.throwIfAborted();
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server does not answer. It may be stopped, or the network is down.");
  }
}

async function errorOf(response) {
  const text = await response.text();
  const details = { status: response.status, retryAfter: response.headers.get("retry-after") };
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message, { ...details, code: error.code });
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}.`, details); // Not JSON: a proxy's page.
  }
}

async function* eventData(body) {
  let rest = "";
  for await (const part of chunks(body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + part).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

// Safari cannot iterate over streams.
async function* chunks(readable) {
  const reader = readable.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {}); // Fails if the stream was aborted.
  }
}

let asking = null;

/** @param {boolean} refused true if the server rejected a token @returns {Promise<boolean>} true if the user entered a token */
function askToken(refused) {
  asking ??= showTokenDialog(refused).finally(() => (asking = null));
  return asking;
}

function showTokenDialog(refused) {
  const dialog = document.getElementById("token-dialog");
  dialog.querySelector(".refused").hidden = !refused;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const field = dialog.querySelector("input");
      const given = dialog.returnValue === "use" && field.value.trim();
      if (given) sessionStorage.setItem(TOKEN, given);
      field.value = "";
      resolve(Boolean(given));
    }, { once: true });
  });
}
