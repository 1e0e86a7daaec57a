// What a generated text read: its chunks, each next to the neighbors that the model could read for it.

import { element } from "../lib/elements.js";
import { chunkRow } from "./chunk_row.js";
import { codePoints } from "./marks.js";
import { SIMILARITY } from "./neighbor.js";
import { LEAST_RUN } from "./shared_runs.js";

const NOTHING_YET = "Neighbors are looked up when a chunk is complete, so the first chunk has none and is the same in both texts.";

/**
 * Collect the events of a stream with sources.
 *
 * @param {string} prompt
 * @returns {{card: HTMLElement, add: (event: object) => void, finish: () => void}}
 */
export function readChunks(prompt) {
  const rows = element("div", { class: "rows" });
  const copying = element("li", { hidden: true }, element("span", { class: "copied", "data-ranks": 1 }, "Underlined"), ": copied from the neighbor with this number");
  const shared = element("li", {}, element("span", { class: "shared" }, "Dotted"), `: a run of at least ${LEAST_RUN} tokens that is also in a neighbor, where it is marked`);
  const legend = element("ul", { class: "legend-list" }, copying, shared, element("li", {}, SIMILARITY));
  const card = element("section", { class: "card passage", "aria-label": "What the text with neighbors read", hidden: true }, element("h3", {}, "What the text with neighbors read"), legend, rows);
  let [length, current] = [0, { number: 0, note: NOTHING_YET, tokens: [], start: 0, neighbors: [], copies: [] }];

  const finish = () => {
    if (current.tokens.length) rows.append(chunkRow(current));
    current = { ...current, tokens: [] };
  };
  const add = ({ text, sources }) => {
    card.hidden = false;
    const last = sources?.chunks.at(-1);
    if (last) {
      finish();
      const note = length || prompt.endsWith(last.text) ? "" : "It begins in the prompt.";
      current = { number: last.chunk + 1, note, tokens: [], start: length, neighbors: last.neighbors, copies: [] };
    }
    current.tokens.push({ text, node: element("span", { class: text.includes("\n") ? "token newline" : "token" }, text) });
    for (const copy of sources?.copies ?? []) addCopy(current.copies, copy);
    copying.hidden &&= !current.copies.length;
    length += codePoints(text);
  };
  return { card, add, finish };
}

/** Add a copied token to a chunk's runs: it continues the last one if it is next in the text and in the neighbor. */
function addCopy(copies, copy) {
  const last = copies.at(-1);
  const continues = last?.neighbor === copy.neighbor && last.text[1] === copy.text[0] && last.neighbor_text[1] === copy.neighbor_text[0];
  if (!continues) copies.push(copy);
  else copies[copies.length - 1] = { ...last, text: [last.text[0], copy.text[1]], neighbor_text: [last.neighbor_text[0], copy.neighbor_text[1]], tokens: last.tokens + copy.tokens };
}
