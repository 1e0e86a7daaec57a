// A chunk that the model reads or writes, next to the neighbors that it could read: those of the chunk before it.

import { element, language } from "../lib/elements.js";
import { counted } from "../lib/numbers.js";
import { codePoints, linkRuns } from "./marks.js";
import { neighborFold } from "./neighbor.js";
import { LEAST_RUN, sharedRuns } from "./shared_runs.js";

/** Scripts without spaces have no ends of words. */
const LETTER = /^(?![\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}])[\p{L}\p{N}]/u;

/**
 * A chunk with its neighbors.
 *
 * @typedef {object} Chunk
 * @property {number} number from 0
 * @property {string} [note] below the title
 * @property {{text: string, node: HTMLElement}[]} tokens with the nodes that show them
 * @property {number} start characters of the answer's text before its first token
 * @property {import("./neighbor.js").Hit[]} neighbors
 * @property {{text: [number, number], neighbor: number, neighbor_text: [number, number], tokens: number}[]} copies
 */

/**
 * The neighbors that a chunk could read. This function also marks the chunk's tokens.
 *
 * @param {Chunk} chunk
 * @returns {HTMLElement[]}
 */
export function neighborsRead({ number, tokens, start, neighbors, copies }) {
  const marks = neighbors.map(() => []);
  markShared(number, tokens, neighbors, marks);
  markCopied(number, tokens, start, copies, marks);
  const found = neighbors.map((neighbor, rank) => neighborFold(neighbor, rank, marks[rank], factOf(neighbor, marks[rank]), rank === 0));
  return found.length ? [element("p", { class: "label" }, `Neighbors of chunk ${number}, which the model could read in chunk ${number + 1}`), ...found] : [];
}

/** A chunk next to its neighbors. @param {Chunk} chunk @returns {HTMLElement} */
export function chunkRow(chunk) {
  const { number, note, tokens } = chunk;
  const found = neighborsRead(chunk);
  numberWords(tokens);
  const text = element("div", { class: "text tokens", ...language(tokens.map((each) => each.text).join("")) }, ...tokens.map(({ node }) => node));
  const name = `Chunk ${number + 1}`;
  const title = element("h3", {}, `${name} `, element("small", {}, counted(tokens.length, "token")));
  const row = element(
    "article",
    { class: "chunk-row", "aria-label": name },
    element("div", { class: "query" }, title, note ? element("p", { class: "label" }, note) : null, text),
    element("div", { class: "found" }, ...found),
  );
  linkRuns(row);
  return row;
}

function markShared(number, tokens, neighbors, marks) {
  const texts = tokens.map((each) => each.text);
  neighbors.forEach((neighbor, rank) => {
    const other = neighbor.text + neighbor.continuation;
    sharedRuns(texts, other).forEach((run, index) => {
      const key = `${number}.${rank}.${index}`;
      const from = codePoints(other.slice(0, run.at));
      marks[rank].push({ start: from, stop: from + codePoints(run.text), key, tokens: run.stop - run.start, rank });
      tokens.slice(run.start, run.stop).forEach(({ node }) => addKey(node, key, "shared"));
    });
  });
}

function markCopied(number, tokens, start, copies, marks) {
  let at = start;
  const places = tokens.map(({ text }) => [at, (at += codePoints(text))]);
  copies.forEach(({ text: [from, to], neighbor: rank, neighbor_text: [begin, end], tokens: length }, index) => {
    const key = `${number}.copy.${index}`;
    marks[rank]?.push({ start: begin, stop: end, key, tokens: length, rank, copied: true });
    const copied = tokens.filter((_, token) => places[token][0] >= from && places[token][1] <= to && places[token][1] > from);
    for (const { node } of copied) {
      addKey(node, key, "copied");
      node.dataset.source = rank + 1;
    }
    const last = copied.findLast(({ text }) => text.trim())?.node;
    if (last) addRanks(last, [String(rank + 1)]);
  });
}

function addRanks(node, ranks) {
  node.dataset.ranks = [...new Set([...(node.dataset.ranks?.split(" ") ?? []), ...ranks])].sort((a, b) => a - b).join(" ");
}

/** Move the numbers of neighbors to the ends of words. @param {{text: string, node: HTMLElement}[]} tokens of a text, in order */
export function numberWords(tokens) {
  tokens.slice(0, -1).forEach(({ text, node }, index) => {
    const next = tokens[index + 1];
    if (!node.dataset.ranks || !/[\p{L}\p{N}]$/u.test(text) || !LETTER.test(next.text)) return;
    addRanks(next.node, node.dataset.ranks.split(" "));
    delete node.dataset.ranks;
  });
}

function addKey(node, key, kind) {
  node.dataset.keys = [node.dataset.keys, key].filter(Boolean).join(" ");
  node.classList.add(kind);
}

function factOf({ score }, marks) {
  const copied = sum(marks.filter((mark) => mark.copied));
  const longest = Math.max(0, ...marks.filter((mark) => !mark.copied).map((mark) => mark.tokens));
  const facts = [`similarity ${score.toFixed(2)}`, copied ? `${counted(copied, "token")} copied` : "", longest ? `longest shared run ${longest} tokens` : ""];
  if (!marks.length) facts.push(`no shared run of ${LEAST_RUN} tokens`);
  return facts.filter(Boolean).join(" · ");
}

const sum = (marks) => marks.reduce((total, mark) => total + mark.tokens, 0);
