// Texts with marks for token runs that two texts have in common. Pointing at a run highlights its counterpart too.

import { element } from "../lib/elements.js";
import { counted } from "../lib/numbers.js";

/** Tokens of a run that has the full color; shorter ones are fainter. */
const FULL_COLOR = 16;

/**
 * A run that two texts share. `start` and `stop` count characters as Python does (code points, not UTF-16 units). Both
 * texts have the same `key`. `rank`: number of the neighbor, from 0. `copied`: the model copied it. `word`: a word of the
 * question, not a run. `about`: a description in place of the usual one.
 *
 * @typedef {{start: number, stop: number, key: string, tokens: number, rank: number, copied?: boolean, word?: boolean, about?: string}} Mark
 */

/** @param {string} text @returns {number} its length as Python counts it */
export const codePoints = (text) => Array.from(text).length;

/**
 * Split a text at the ends of its marks and at `border`.
 *
 * @param {string} text
 * @param {Mark[]} marks may overlap
 * @param {number} [border]
 * @returns {{text: string, start: number, stop: number, marks: Mark[]}[]}
 */
export function cut(text, marks, border = 0) {
  const characters = Array.from(text);
  const edges = [0, border, characters.length, ...marks.flatMap(({ start, stop }) => [start, stop])];
  const sorted = [...new Set(edges)].filter((edge) => edge <= characters.length).sort((a, b) => a - b);
  return sorted.slice(0, -1).map((start, number) => ({
    text: characters.slice(start, sorted[number + 1]).join(""),
    start,
    stop: sorted[number + 1],
    marks: marks.filter((mark) => mark.start <= start && start < mark.stop),
  }));
}

/**
 * Nodes of a text that `cut` has split.
 *
 * @param {{text: string, stop: number, marks: Mark[]}[]} pieces
 * @param {boolean} [numbered] write the number of the neighbor behind each run
 * @returns {Node[]}
 */
export function marked(pieces, numbered = false) {
  return pieces.flatMap((piece) => (piece.marks.length ? runs(piece, numbered) : [document.createTextNode(piece.text)]));
}

/** Line breaks and indentation of a run are marks without color, which would be a large block. */
function runs(piece, numbered) {
  const parts = piece.text.split(/(\s*\n\s*|\s{2,})/u).filter(Boolean);
  const last = parts.findLastIndex((part) => part.trim());
  return parts.map((text, number) => {
    const ends = number === Math.max(0, last);
    const node = run({ ...piece, text, stop: ends ? piece.stop : null }, numbered);
    node.classList.toggle("gap", !text.trim());
    return node;
  });
}

function run({ text, stop, marks }, numbered) {
  const ended = marks.filter((mark) => mark.stop === stop).map((mark) => mark.rank + 1);
  const kinds = ["copied", "word"].filter((kind) => marks.some((mark) => mark[kind])).join(" ");
  const described = [...new Set(marks.map((mark) => describe(mark, numbered)))].join(", ");
  const node = element(
    "mark",
    {
      class: kinds || null,
      "data-keys": marks.map((mark) => mark.key).join(" "),
      "data-ranks": numbered && ended.length ? [...new Set(ended)].join(" ") : null,
      tabindex: -1,
      title: described,
      "aria-description": described,
    },
    text,
  );
  node.style.setProperty("--run", Math.min(1, Math.max(...marks.map((mark) => mark.tokens)) / FULL_COLOR));
  return node;
}

const describe = ({ tokens, rank, copied, word, about }, numbered) =>
  about ? about : word ? "a word of your question" : `${copied ? "copied" : "shared"}: ${counted(tokens, "token")}${numbered ? ` of neighbor ${rank + 1}` : ""}`;

/** Make the first run of a text reachable with Tab; arrow keys move on from there. @param {HTMLElement} text */
export function reachable(text) {
  text.querySelector("mark:not(.gap)")?.setAttribute("tabindex", "0");
}

/** Highlight all runs of the same pair when the user points at a run or token in `card`; a click unfolds them. @param {HTMLElement} card */
export function linkRuns(card) {
  const keysOf = (node) => node?.dataset.keys?.split(" ") ?? [];
  const activate = ({ target, type }) => {
    const keys = keysOf(target.closest?.("[data-keys]"));
    for (const node of card.querySelectorAll("[data-keys]")) {
      const linked = keysOf(node).some((key) => keys.includes(key));
      node.classList.toggle("linked", linked);
      if (linked && type === "click") for (let fold = node.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    }
  };
  for (const event of ["pointerover", "focusin", "click"]) card.addEventListener(event, activate);
}
