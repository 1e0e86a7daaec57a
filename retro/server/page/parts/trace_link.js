// A link to the view "Trace" with a text.

import { addressOf } from "../lib/address.js";
import { element } from "../lib/elements.js";

/** @param {string} text @returns {HTMLElement | string} nothing for a text of blanks */
export function traceLink(text) {
  if (!text.trim()) return "";
  return element("p", { class: "after-text" }, element("a", { href: addressOf("trace", { parameters: { text } }) }, "Find where this text occurs"));
}
