// One of the two generated texts: its card, and the function that generates it.

import { stream } from "../lib/api.js";
import { element, language } from "../lib/elements.js";
import { counted, percent } from "../lib/numbers.js";
import { write } from "./writing.js";

const PROMPT_END = 120; // characters of the prompt that a text begins with

/**
 * @param {object} request body of POST /generate
 * @param {() => void} retry
 * @param {(event: object) => void} add called with each event
 * @returns {{name: string, card: HTMLElement, run: (own: AbortController) => Promise<void>, answer: () => {text: string, sources: object[]}}}
 */
export function pane(request, retry, add) {
  const { prompt, retrieval } = request;
  const title = retrieval ? "With neighbors" : "Without neighbors";
  const state = element("p", { class: "state" });
  const trusted = element("p", { class: "trusted", hidden: true });
  const trouble = element("div");
  const text = element("span", { class: "generated" });
  const output = element("pre", { class: "text", ...language(prompt) }, element("span", { class: "prompt" }, endOf(prompt)), text);
  const card = element("section", { class: "card pane", "aria-label": title }, element("h3", {}, title), state, trusted, trouble, output);
  const answer = { text: "", sources: [] };

  const show = (event) => {
    text.append(...piece(event, answer.text !== ""));
    answer.text += event.text;
    if (event.sources) answer.sources.push(event.sources);
    const trust = answer.sources[0]?.trust;
    if (trust) {
      trusted.hidden = false;
      trusted.textContent = sentenceOf(trust, answer.sources.reduce((sum, { copied_tokens: copied }) => sum + (copied ?? 0), 0));
    }
    add(event);
  };
  const run = (own) => write({ card, state, trouble }, stream("generate", request, own.signal), own, show, retry);
  return { name: retrieval ? "with_neighbors" : "without_neighbors", card, run, answer: () => answer };
}

/** How far retrieval is trusted, why so little, and how much was copied. */
function sentenceOf({ share, prompt_tokens: tokens, low_because: reason }, copied) {
  const why = {
    "short prompt": `: the prompt is short (${counted(tokens, "token")}). A longer beginning that resembles the documents raises it`,
    "other text": ": copying would have gained little in the prompt",
  };
  return `Trust in retrieval ${percent(share)}${why[reason] ?? ""}. Copied: ${copied.toFixed(1)} tokens.`;
}

function endOf(prompt) {
  const characters = Array.from(prompt);
  if (characters.length <= PROMPT_END) return prompt;
  return `… ${characters.slice(-PROMPT_END).join("").replace(/^\S{0,20}\s+/u, "")}`; // from a whole word on
}

/** The nodes of an event: a border where a chunk begins, and the text, underlined if it is copied. */
function piece({ text, sources }, bordered) {
  const last = sources?.chunks.at(-1);
  const border = last && bordered ? [element("span", { class: "border", title: `Chunk ${last.chunk + 2} begins.` })] : [];
  const copy = sources?.copies[0];
  const attributes = copy ? { class: "piece copied", title: `copied from neighbor ${copy.neighbor + 1}` } : { class: "piece" };
  return [...border, element("span", attributes, text)];
}

/**
 * Mark the first word in which two generated texts differ.
 *
 * @param {HTMLElement[]} cards of two panes
 * @returns {string[]} the word of each text; none if the texts are equal as far as both go
 */
export function markDifference(cards) {
  const texts = cards.map((card) => card.querySelector(".generated").textContent);
  const start = differenceOf(...texts);
  const words = texts.map((text) => /^\s*\S+/u.exec(text.slice(start))?.[0] ?? "");
  if (words.includes("") || words[0] === words[1]) return [];
  cards.forEach((card, number) => {
    let at = 0;
    for (const node of card.querySelectorAll(".piece")) {
      const [from, to] = [at, (at += node.textContent.length)];
      node.classList.toggle("first-difference", from < start + words[number].length && to > start);
    }
  });
  return words.map((word) => word.trim());
}

/** Where two texts begin to differ, from the start of the word. */
function differenceOf(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at++;
  const between = [one, other].every((text) => /^\s/u.test(text.slice(at)));
  return between ? at : at - /\S*$/u.exec(one.slice(0, at))[0].length;
}
