// A region of the page that loads: a skeleton, then the answer or an error, with a button to retry if that may help.

import { ApiError } from "../lib/api.js";
import { element } from "../lib/elements.js";

const running = new WeakMap();

/**
 * Fill a region with the nodes that `work` returns. A new call cancels the previous one.
 *
 * @param {HTMLElement} region
 * @param {string} label current activity, for the skeleton and for screen readers
 * @param {(signal: AbortSignal) => Promise<{nodes: Node[], summary: string, focus?: HTMLElement}>} work `focus`: one of the nodes
 */
export async function fill(region, label, work) {
  running.get(region)?.abort();
  const control = new AbortController();
  running.set(region, control);
  region.setAttribute("aria-busy", "true");
  region.replaceChildren(skeleton(label));
  announce(label, region);
  try {
    const { nodes, summary, focus } = await work(control.signal);
    if (control.signal.aborted) return;
    region.replaceChildren(...nodes);
    focus?.focus();
    announce(summary, region);
  } catch (error) {
    if (control.signal.aborted) return;
    region.replaceChildren(problem(error, () => fill(region, label, work)));
  }
  region.setAttribute("aria-busy", "false");
}

/**
 * Announce a message to screen readers. A view that the user has left is silent.
 *
 * @param {string} message
 * @param {HTMLElement} region what the message is about
 */
export function announce(message, region) {
  if (!region.closest("[hidden]")) document.getElementById("status").textContent = message;
}

/**
 * A card with an error's message. Errors of this page itself are also reported to the console.
 *
 * @param {Error} error
 * @param {() => void} retry
 * @returns {HTMLElement}
 */
export function problem(error, retry) {
  if (!(error instanceof ApiError)) reportError(error);
  if (error.code === "model_not_found") return noModel();
  const wait = error.status === 429 && error.retryAfter ? ` Wait ${error.retryAfter} s before you try again.` : "";
  return element(
    "div",
    { class: "card problem", role: "alert" },
    element("h3", {}, heading(error)),
    element("p", {}, `${error.message}${wait}`),
    mayPass(error) ? element("button", { type: "button", click: retry }, "Try again") : null,
  );
}

/** A card that explains how to start a server with a model. @returns {HTMLElement} */
export function noModel() {
  const card = notice("No model is served", "This server was started without a checkpoint. To score and generate, start it with one:");
  card.append(command("retro serve DATASTORE --checkpoint CHECKPOINT"));
  return card;
}

/** A card that explains how to give a model a chat template. @returns {HTMLElement} */
export function noChat() {
  const card = notice("This model does not chat", "It has no chat template, so it continues texts: see Write. For a model that was trained on conversations, start the server with its template:");
  card.append(command("retro serve DATASTORE --checkpoint CHECKPOINT --chat-template FILE"));
  return card;
}

/** A card that explains how to build what a trace needs. @returns {HTMLElement} */
export function noSuffixes() {
  const card = notice("This datastore cannot be traced yet", "It lacks the sorted prefixes of its documents. Build them, and start the server again:");
  card.append(command("retro index CONFIG --stage suffixes"));
  return card;
}

const command = (line) => element("pre", { class: "command" }, line);

/** @param {string} title @param {string} text @returns {HTMLElement} */
export const notice = (title, text) => element("div", { class: "card notice" }, element("h3", {}, title), element("p", {}, text));

/** True if the same request may succeed later: with a token, after a pause or a restart. Invalid requests never succeed. */
const mayPass = ({ status = 0 }) => status < 400 || status >= 500 || [401, 408, 429].includes(status);

function heading({ status = 0 }) {
  if (status === 401) return "A token is required";
  if (status === 404) return "Not found";
  if (status === 429) return "The server is busy";
  if (status === 503) return "The server is unavailable";
  if (status >= 500) return "Server error";
  return status >= 400 ? "Invalid request" : "No answer";
}

/** A card that shows the current activity. @param {string} label @returns {HTMLElement} */
export function skeleton(label) {
  const bars = Array.from({ length: 4 }, () => element("span", { class: "bar" }));
  return element("div", { class: "card skeleton" }, element("p", {}, label), ...bars);
}
