// Scored tokens: their nodes, their color, and their numbers in words.

import { element } from "../lib/elements.js";
import { bitsOf, count, probability, verdict } from "../lib/numbers.js";

/** Choices for the difference in bits that has the full color. */
const SCALES = [0.1, 0.2, 0.5, 2, 5, 10];
const LEAST_COLOR = 0.12; // of the smallest difference, so that it is visible

/**
 * @typedef {object} Token a token in the answer of POST /score
 * @property {string} text
 * @property {number} on log-probability in nats with retrieval
 * @property {number} off without
 * @property {number} difference on − off
 * @property {number} chunk
 */

/** @param {Token} token @returns {HTMLElement} */
export function tokenNode({ text, difference, chunk }) {
  const sign = chunk === 0 ? "first" : difference > 0 ? "helped" : difference < 0 ? "hurt" : "";
  // A token without characters is a part of a character.
  const kind = text.includes("\n") ? "newline" : text === "" ? "empty" : /^\s{2,}$/u.test(text) ? "blank" : "";
  return element("span", { class: `token ${sign} ${kind}`.trim(), tabindex: -1 }, text);
}

/**
 * The legend of the colors, with the choice of their scale. It colors the nodes.
 *
 * @param {Token[]} tokens
 * @param {HTMLElement[]} nodes
 * @returns {HTMLElement}
 */
export function colorScale(tokens, nodes) {
  const legend = element("div", { class: "legend" });
  const select = element("select", {}, ...SCALES.map((bits) => element("option", { value: bits }, `${bits} bits`)));
  select.value = fittingScale(tokens);
  const paint = () => {
    const limit = Number(select.value);
    tokens.forEach(({ difference }, number) => {
      const strength = Math.min(1, Math.abs(bitsOf(difference)) / limit);
      nodes[number].style.setProperty("--strength", difference ? LEAST_COLOR + (1 - LEAST_COLOR) * strength : 0);
    });
    const label = (text) => element("span", {}, text);
    legend.replaceChildren(
      element("div", { class: "gradient", "aria-hidden": "true" }),
      element("div", { class: "ticks" }, label(`${limit} more bits: hurt`), label("no change"), label(`${limit} fewer bits: helped`)),
    );
  };
  select.addEventListener("change", paint);
  paint();
  return element("div", { class: "scale" }, legend, element("label", { class: "field" }, "Full color at", select));
}

/** The smallest scale at which at most one token in ten has the full color. */
function fittingScale(tokens) {
  const sizes = tokens.map(({ difference }) => Math.abs(bitsOf(difference))).filter(Boolean).sort((a, b) => a - b);
  const high = sizes[Math.floor(0.9 * sizes.length)] ?? 1;
  return SCALES.find((scale) => scale >= high) ?? SCALES.at(-1);
}

/**
 * A token's numbers for the line above the text.
 *
 * @param {Token} token
 * @param {HTMLElement} node with the class `shared` if it is in such a run, and `data-source` if it is copied
 * @returns {Node[]}
 */
export function numbersOf({ text, on, off, difference, chunk }, node) {
  const name = element("code", {}, JSON.stringify(text));
  const item = (label, value, kind = "") => element("span", {}, `${label} `, element("b", { class: kind }, value));
  if (chunk === 0) return [name, item("probability", probability(Math.exp(off))), element("span", {}, "chunk 1: no neighbors yet")];
  const { text: change, kind } = verdict(bitsOf(difference));
  const origin = node.dataset.source ? `copied from neighbor ${node.dataset.source}` : node.classList.contains("shared") ? "also in a neighbor" : "";
  return [
    name,
    item("probability with neighbors", probability(Math.exp(on))),
    item("without", probability(Math.exp(off))),
    ...(difference ? [element("span", {}, factor(difference))] : []),
    element("b", { class: kind }, change),
    ...(origin ? [element("span", {}, origin)] : []),
  ];
}

/** How many times as likely, in words. */
function factor(difference) {
  const times = Math.exp(Math.abs(difference));
  if (times < 1.05) return difference > 0 ? "slightly likelier" : "slightly less likely";
  return `${times < 100 ? times.toPrecision(2) : count(Math.round(times))} times ${difference > 0 ? "as likely" : "less likely"}`;
}
