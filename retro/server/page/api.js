// Requests to the server this page came from. A 401 asks for the token, every other error becomes an ApiError with the server's words.

const TOKEN = "retro-token";

/** What went wrong, in the server's words: `status` 0 where it did not answer at all. */
export class ApiError extends Error {
  constructor(message, { status = 0, type = "", retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, type, retryAfter });
  }
}

/** @param {string} path relative to the page @param {AbortSignal} [signal] @returns {Promise<any>} */
export const get = async (path, signal) => (await request(path, { signal })).json();

/** @param {string} path @param {object} body @param {AbortSignal} [signal] @returns {Promise<any>} */
export const post = async (path, body, signal) => (await send(path, body, signal)).json();

/**
 * Events of a stream as they come. An error in the middle of it is thrown.
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
    if (event.error) throw new ApiError(event.error.message, { status: response.status, type: event.error.type });
    yield event;
  }
  throw new ApiError("The server ended the stream early.");
}

let datastore = null;
const waiting = [];

/** What is served, asked for until it is answered once. @returns {Promise<any>} */
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
 * Call `use` with what is served, as soon as that is known. If the server does not tell now, it is asked again after its next answer.
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
    // Another request may have brought a token while this one was under way.
    if (token === sessionStorage.getItem(TOKEN) && !(await askToken(Boolean(token)))) throw await errorOf(response);
    options.signal?.throwIfAborted();
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server does not answer. It may have been stopped, or the network is down.");
  }
}

async function errorOf(response) {
  const text = await response.text();
  const facts = { status: response.status, retryAfter: response.headers.get("retry-after") };
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message, { ...facts, type: error.type });
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}.`, facts); // A proxy's page, not ours.
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

// Safari's streams cannot be iterated.
async function* chunks(readable) {
  const reader = readable.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {}); // Of a stream that has been aborted there is nothing left to cancel.
  }
}

let asking = null;

/** @param {boolean} refused whether there was a token @returns {Promise<boolean>} whether there is a new one */
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
