// The line above an answer: what came out, with the meaning of colors and marks and the download behind a question mark.

import { element } from "../lib/elements.js";

/**
 * @param {string} id
 * @param {(Node | string)[]} parts of the line
 * @param {Node[]} help shown when the question mark is opened
 * @returns {HTMLElement}
 */
export function strip(id, parts, help) {
  const mark = element("summary", { "aria-label": "What colors and marks mean" }, "?");
  return element("div", { class: "strip", id }, ...parts, element("details", { class: "help" }, mark, ...help));
}
