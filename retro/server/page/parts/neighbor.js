// A neighbor: a stored chunk with its document, its place in the document, and the runs that it shares with a chunk.

import { addressOf } from "../lib/address.js";
import { breakable, element, language, sourceText } from "../lib/elements.js";
import { roving } from "../lib/keyboard.js";
import { codePoints, cut, marked, reachable } from "./marks.js";

/**
 * @typedef {object} Hit a neighbor in an answer of the server
 * @property {number} chunk_id
 * @property {string} document_id
 * @property {string} title
 * @property {string} source
 * @property {string} text
 * @property {string} continuation
 */

export const SIMILARITY = "Similarity: how closely the vectors (embeddings) of two chunks agree. 1: the same, 0: unrelated.";

/** @param {Hit} neighbor @returns {string} title, or id of the document if it has none */
export const nameOf = ({ title, document_id: id, chunk_id: chunk }) => title || id || `chunk ${chunk}`;

/**
 * A neighbor as an article with heading, document, facts and text.
 *
 * @param {Hit} neighbor
 * @param {number} rank from 0
 * @param {import("./marks.js").Mark[]} marks in the text with its continuation
 * @param {Node[]} facts
 * @returns {HTMLElement}
 */
export function neighborCard(neighbor, rank, marks, facts) {
  const card = element(
    "article",
    { class: "neighbor", "aria-label": `Neighbor ${rank + 1}` },
    element("h4", {}, element("span", { class: "rank" }, rank + 1), documentLink(neighbor, nameOf(neighbor))),
    ...origin(neighbor),
    element("p", { class: "facts" }, ...facts),
    ...texts(neighbor, marks),
    element("p", { class: "after-text" }, moreLikeThis(neighbor)),
  );
  return withKeys(card);
}

/**
 * A neighbor that unfolds. Its first line has number, document and facts.
 *
 * @param {Hit} neighbor
 * @param {number} rank from 0
 * @param {import("./marks.js").Mark[]} marks in the text with its continuation
 * @param {string} fact
 * @param {boolean} open
 * @returns {HTMLElement}
 */
export function neighborFold(neighbor, rank, marks, fact, open) {
  const line = [element("span", { class: "rank" }, rank + 1), element("b", language(nameOf(neighbor)), ...breakable(nameOf(neighbor))), " ", element("span", { class: "fact" }, fact)];
  const links = element("p", { class: "after-text" }, documentLink(neighbor, "Open the document"), " ", moreLikeThis(neighbor));
  const card = element("details", { class: "neighbor", open }, element("summary", {}, ...line), ...origin(neighbor), ...texts(neighbor, marks), links);
  return withKeys(card);
}

/** The id below a title, so that titles like "tool" can be told apart, and the source. */
function origin({ title, document_id: id, source }) {
  const parts = [title && id && title !== id ? element("span", {}, ...breakable(id)) : null, source ? sourceText(source) : null].filter(Boolean);
  return parts.map((part) => element("p", { class: "source" }, part));
}

function texts(neighbor, marks) {
  const length = codePoints(neighbor.text);
  const pieces = cut(neighbor.text + neighbor.continuation, marks, length);
  const block = (kind, part) => element("pre", { class: kind, ...language(neighbor.text) }, ...marked(part));
  const [own, next] = [pieces.filter(({ start }) => start < length), pieces.filter(({ start }) => start >= length)];
  if (!next.length) return [block("text", own)];
  const open = next.some((piece) => piece.marks.length > 0);
  return [block("text", own), element("details", { class: "next", open }, element("summary", {}, "The document continues"), block("continuation", next))];
}

function documentLink({ document_id: id, chunk_id: chunk }, text) {
  if (!id) return element("span", {}, text);
  return element("a", { href: addressOf("document", { id, parameters: { chunk: String(chunk) } }), ...language(text) }, ...breakable(text));
}

const moreLikeThis = ({ text }) => element("a", { href: addressOf("neighbors", { parameters: { text } }) }, "More like this");

function withKeys(card) {
  reachable(card);
  roving(card, "mark:not(.gap)");
  return card;
}
