// "Where it helps": a text, colored by how much the neighbors help (blue) or hurt (orange), and the neighbors of the chunk that the
// user points at.

import { post, served, whenServed } from "../lib/api.js";
import { element, figures, language } from "../lib/elements.js";
import { roving } from "../lib/keyboard.js";
import { counted, fixed, percent } from "../lib/numbers.js";
import { neighborsRead, numberWords } from "../parts/chunk_row.js";
import { downloadButton } from "../parts/download.js";
import { codePoints, linkRuns } from "../parts/marks.js";
import { SIMILARITY } from "../parts/neighbor.js";
import { queryForm } from "../parts/query_form.js";
import { fill, noModel, notice } from "../parts/region.js";
import { LEAST_RUN } from "../parts/shared_runs.js";
import { strip } from "../parts/strip.js";
import { traceLink } from "../parts/trace_link.js";
import { colorScale, numbersOf, tokenNode } from "../parts/tokens.js";

const FIRST = "Chunk 1: no neighbors yet.";
const ONE_CHUNK = "The first chunk has no neighbors, so both predictions are equal. A longer text shows where neighbors help.";
const UNIT = "bits per byte: the bits that the model needs for each byte of the text. Fewer is better.";

const view = document.getElementById("passage");
const form = view.querySelector("form");
const results = view.querySelector(".results");

export const show = queryForm(form, "passage", score);
whenServed(({ model }) => !model && results.replaceChildren(noModel()));

function score(values) {
  fill(results, "Scoring the text with and without neighbors…", async (signal) => {
    const body = { text: values.get("text"), k: Number(values.get("k") ?? form.elements.k.value), return_sources: true };
    const answer = await post("score", body, signal);
    const save = downloadButton("scores", () => ({ request: body, ...answer }));
    // Words that are copied from the whole datastore have no neighbor; the trace finds their documents.
    const link = (await served()).trace ? traceLink(body.text) : "";
    return { nodes: [...details(answer, save), link].filter(Boolean), summary: sentence(answer) };
  });
}

function details(answer, save) {
  if (answer.bits_per_byte_on !== null) return [passage(answer, save)];
  const missing = notice("Without neighbors only", "This model does not read neighbors, so there is no comparison.");
  return [figures([{ label: "Bits per byte", value: fixed(answer.bits_per_byte_off, 4), note: UNIT }]), missing, save];
}

/** The answer in a sentence. Fewer bits are better. */
function sentence({ tokens, bits_per_byte_on: on, bits_per_byte_off: off }) {
  if (on === null) return `${fixed(off, 4)} bits per byte without neighbors.`;
  if (!tokens.some(({ chunk }) => chunk > 0)) return ONE_CHUNK;
  const share = Math.abs(on - off) / off;
  const bits = on === off ? "as many bits as without it" : `${percent(share, share < 0.01 ? 2 : 0)} ${on < off ? "fewer" : "more"} bits`;
  return `With retrieval the model guesses this text in ${bits}.`;
}

/** The answer in one line. */
function verdicts(answer) {
  const { tokens, bits_per_byte_on: on, bits_per_byte_off: off } = answer;
  const could = tokens.filter(({ chunk }) => chunk > 0);
  if (!could.length) return [element("p", {}, ONE_CHUNK)];
  const share = (sign, word) => `${percent(could.filter(({ difference }) => sign * difference > 0).length / could.length)} ${word}`;
  return [
    element("b", { class: `verdict ${on < off ? "helped" : on > off ? "hurt" : ""}` }, sentence(answer)),
    element("span", {}, `${fixed(off, 2)} → ${fixed(on, 2)} bits per byte`),
    element("span", {}, `${counted(could.length, "token")} with neighbors: `, element("b", { class: "helped" }, share(1, "helped")), ", ", element("b", { class: "hurt" }, share(-1, "hurt"))),
  ];
}

function passage(answer, save) {
  const { tokens, sources } = answer;
  const nodes = tokens.map(tokenNode);
  const chunks = chunksOf(tokens, nodes, sources);
  const whole = tokens.map(({ text }) => text).join("");
  const text = element("div", { class: "text tokens", role: "group", "aria-label": "Your text", ...language(whole) }, ...chunks.flatMap(({ number, tokens: own }) => [border(number), ...own.map(({ node }) => node)]));
  const lists = chunks.map((chunk) => {
    const found = chunk.number ? neighborsRead(chunk) : [element("p", { class: "label" }, FIRST)];
    return element("section", { class: "found", "aria-label": `Neighbors for chunk ${chunk.number + 1}` }, ...found);
  });
  numberWords(chunks.flatMap((chunk) => chunk.tokens));
  const point = ({ chunk }) => lists.forEach((list, number) => (list.hidden = number !== chunk));
  point(tokens.find(({ chunk }) => chunk === (sources.copies[0]?.chunk ?? 0) + 1) ?? tokens[0]);
  nodes[Math.max(0, tokens.findIndex(({ chunk }) => chunk > 0))]?.setAttribute("tabindex", "0");
  roving(text, ".token");
  const line = strip("passage-strip", verdicts(answer), [colorScale(tokens, nodes), legend(sources), element("p", {}, save)]);
  const card = element("section", { class: "card passage" }, line, element("div", { class: "beside" }, text, element("div", { class: "read" }, ...lists)), readout(text, tokens, nodes, point));
  linkRuns(card);
  return card;
}

const border = (number) => (number ? element("span", { class: "border", title: `Chunk ${number + 1} begins.` }) : "");

function legend({ copies }) {
  const item = (kind, text, rank) => element("li", {}, element("span", { class: kind, "data-ranks": rank }, "word"), text);
  return element(
    "ul",
    { class: "legend-list" },
    element("li", {}, "The model looks up neighbors of complete chunks and reads them in the next one, so the first chunk has none."),
    element("li", {}, "One bit fewer: the model finds the token twice as likely. The comparison covers the whole text, its first chunk included."),
    element("li", {}, `Bits per byte: the bits that the model needs for each byte of the text. Fewer is better.`),
    copies.length ? item("copied", ": the model copied it from the neighbor with this number", 1) : "",
    element("li", {}, element("span", { class: "border" }), "A bar: the next chunk begins here, and the model reads other neighbors. Point at a token to see those of its chunk."),
    item("shared", `: a run of at least ${LEAST_RUN} tokens that is also in a neighbor, where it is marked`),
    element("li", {}, SIMILARITY),
  );
}

/** @returns {import("../parts/chunk_row.js").Chunk[]} each with the neighbors of the chunk before it */
function chunksOf(tokens, nodes, { chunks, copies }) {
  const last = tokens.at(-1)?.chunk ?? -1;
  let start = 0;
  return Array.from({ length: last + 1 }, (_, number) => {
    const own = tokens.flatMap(({ text, chunk }, index) => (chunk === number ? [{ text, node: nodes[index] }] : []));
    const neighbors = chunks.find(({ chunk }) => chunk === number - 1)?.neighbors ?? [];
    const chunk = { number, tokens: own, start, neighbors, copies: copies.filter((copy) => copy.chunk === number - 1) };
    start += own.reduce((sum, { text }) => sum + codePoints(text), 0);
    return chunk;
  });
}

/** A line with the numbers of the token that the user points at. */
function readout(text, tokens, nodes, point) {
  const line = element("output", { class: "readout" }, "Point at a token, tap it, or use the arrow keys to see its numbers.");
  const read = ({ target }) => {
    const number = nodes.indexOf(target.closest(".token"));
    if (number < 0) return;
    text.querySelector(".active")?.classList.remove("active");
    nodes[number].classList.add("active");
    point(tokens[number]);
    line.replaceChildren(...numbersOf(tokens[number], nodes[number]));
  };
  for (const event of ["pointerover", "focusin", "click"]) text.addEventListener(event, read);
  return line;
}
