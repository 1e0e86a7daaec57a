// A region of the page that waits for an answer: a skeleton, then the answer or an error, with a way to try again if that may help.

import { ApiError } from "./api.js";
import { element } from "./elements.js";

const running = new WeakMap();

/**
 * Fill a region with what `work` makes; a later call takes the place of one that is under way.
 *
 * @param {HTMLElement} region
 * @param {string} label what is being done, for the skeleton and for readers of screens
 * @param {(signal: AbortSignal) => Promise<{nodes: Node[], summary: string, focus?: HTMLElement}>} work `focus`: one of the nodes
 */
export async function fill(region, label, work) {
  running.get(region)?.abort();
  const control = new AbortController();
  running.set(region, control);
  region.setAttribute("aria-busy", "true");
  region.replaceChildren(skeleton(label));
  announce(label);
  try {
    const { nodes, summary, focus } = await work(control.signal);
    if (control.signal.aborted) return;
    region.replaceChildren(...nodes);
    focus?.focus();
    announce(summary);
  } catch (error) {
    if (control.signal.aborted) return;
    region.replaceChildren(problem(error, () => fill(region, label, work)));
  }
  region.setAttribute("aria-busy", "false");
}

/** Say something to readers of screens. @param {string} message */
export function announce(message) {
  document.getElementById("status").textContent = message;
}

/**
 * An error as a card. What the server said is shown; what is a mistake of this page is also thrown, for the console.
 *
 * @param {Error} error
 * @param {() => void} retry
 * @returns {HTMLElement}
 */
export function problem(error, retry) {
  if (!(error instanceof ApiError)) reportError(error);
  if (error.type === "no_model") return noModel();
  const wait = error.status === 429 && error.retryAfter ? ` Wait ${error.retryAfter} s before you try again.` : "";
  return element(
    "div",
    { class: "card problem", role: "alert" },
    element("h3", {}, heading(error)),
    element("p", {}, `${error.message}${wait}`),
    mayPass(error) ? element("button", { type: "button", click: retry }, "Try again") : null,
  );
}

/** How to start a server that has a model. @returns {HTMLElement} */
export function noModel() {
  return element(
    "div",
    { class: "card notice" },
    element("h3", {}, "No model is served"),
    element("p", {}, "This server was started without a checkpoint. Start it with one to score and to generate:"),
    element("pre", { class: "command" }, "retro serve DATASTORE --checkpoint CHECKPOINT"),
  );
}

/** @param {string} title @param {string} text @returns {HTMLElement} */
export const notice = (title, text) => element("div", { class: "card notice" }, element("h3", {}, title), element("p", {}, text));

/** Whether the same request may be answered later: after a token, a pause or a restart. A request that is refused stays refused. */
const mayPass = ({ status = 0 }) => status < 400 || status >= 500 || [401, 408, 429].includes(status);

function heading({ status = 0 }) {
  if (status === 401) return "A token is needed";
  if (status === 404) return "Not found";
  if (status === 429) return "The server is busy";
  if (status === 503) return "The server is unavailable";
  if (status >= 500) return "The server could not answer";
  return status >= 400 ? "The request was refused" : "No answer";
}

function skeleton(label) {
  const bars = Array.from({ length: 4 }, () => element("span", { class: "bar" }));
  return element("div", { class: "card skeleton" }, element("p", {}, label), ...bars);
}
