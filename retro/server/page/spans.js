// Texts with marks for shared token runs. Pointing at a run highlights its counterpart too.

import { element } from "./elements.js";
import { counted } from "./numbers.js";

/**
 * A run that two texts share. `start` and `stop` count characters as Python does (code points, not UTF-16 units). Both
 * texts have the same `key`.
 *
 * @typedef {{start: number, stop: number, key: string, tokens: number}} Mark
 */

/**
 * Split a text at the ends of its marks and at `border`.
 *
 * @param {string} text
 * @param {Mark[]} marks may overlap
 * @param {number} [border]
 * @returns {{text: string, start: number, marks: Mark[]}[]}
 */
export function cut(text, marks, border = 0) {
  const characters = Array.from(text);
  const edges = [0, border, characters.length, ...marks.flatMap(({ start, stop }) => [start, stop])];
  const sorted = [...new Set(edges)].filter((edge) => edge <= characters.length).sort((a, b) => a - b);
  return sorted.slice(0, -1).map((start, number) => ({
    text: characters.slice(start, sorted[number + 1]).join(""),
    start,
    marks: marks.filter((mark) => mark.start <= start && start < mark.stop),
  }));
}

/** @param {{text: string, marks: Mark[]}[]} pieces @returns {Node[]} */
export function marked(pieces) {
  return pieces.map(({ text, marks }) => (marks.length ? run(text, marks) : document.createTextNode(text)));
}

function run(text, marks) {
  const longest = Math.max(...marks.map((mark) => mark.tokens));
  const described = `shared: ${counted(longest, "token")}`;
  const keys = marks.map((mark) => mark.key).join(" ");
  return element("mark", { "data-keys": keys, tabindex: -1, title: described, "aria-description": described }, text);
}

/** Make the first run of a text reachable with Tab; arrow keys move on from there. @param {HTMLElement} text */
export function reachable(text) {
  text.querySelector("mark")?.setAttribute("tabindex", "0");
}

/** Highlight all runs of the same pair when the user points at a run in `card`. @param {HTMLElement} card */
export function linkRuns(card) {
  const activate = ({ target }) => {
    const keys = target.closest?.("mark")?.dataset.keys.split(" ") ?? [];
    for (const mark of card.querySelectorAll("mark")) {
      mark.classList.toggle("active", mark.dataset.keys.split(" ").some((key) => keys.includes(key)));
    }
  };
  for (const event of ["pointerover", "focusin", "click"]) card.addEventListener(event, activate);
}
