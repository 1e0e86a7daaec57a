// The Neighbors view: the chunks of a text, each next to its neighbors.

import { addressOf } from "./address.js";
import { post } from "./api.js";
import { element, language, sourceText } from "./elements.js";
import { chosenFilters, filterRows } from "./filters.js";
import { roving } from "./keyboard.js";
import { counted, fixed, percent } from "./numbers.js";
import { queryForm } from "./query_form.js";
import { fill, notice } from "./region.js";
import { cut, linkRuns, marked, reachable } from "./spans.js";

const view = document.getElementById("neighbors");
const form = view.querySelector("form");
const results = view.querySelector(".results");

export const show = queryForm(form, "neighbors", search);
filterRows(form.querySelector(".filters"), form);

function search(values) {
  fill(results, "Searching for neighbors…", async (signal) => {
    const body = {
      text: values.get("text"),
      k: Number(values.get("k") ?? form.elements.k.value),
      rerank: values.get("rerank") ?? form.elements.rerank.value,
      filters: chosenFilters(values),
    };
    const { chunks, partial, missing } = await post("neighbors", body, signal);
    const found = chunks.reduce((sum, chunk) => sum + chunk.neighbors.length, 0);
    const summary = `${counted(chunks.length, "chunk")}, ${counted(found, "neighbor")}`;
    const warning = partial ? notice("Partial results", `Parts of the index did not answer: ${missing.join(", ")}.`) : null;
    const cards = chunks.map((chunk, number) => chunkCard(chunk, number, chunks.length));
    return { nodes: [element("p", { class: "summary" }, summary), warning, ...cards].filter(Boolean), summary: `${summary} found.` };
  });
}

/** A card with a chunk on the left and its neighbors on the right; on a phone, one above the other. */
function chunkCard(chunk, number, total) {
  const marks = chunk.neighbors.flatMap((neighbor, rank) => marksOf(neighbor, rank, "chunk"));
  const text = element("pre", { class: "text", ...language(chunk.text) }, ...marked(cut(chunk.text, marks)));
  const found = chunk.neighbors.map(neighborCard);
  const nothing = notice("No neighbors", "No chunk of the datastore passes the filters, or the chunk has no text.");
  const title = element("h3", {}, `Chunk ${number + 1} of ${total}`, element("small", {}, counted(chunk.tokens, "token")));
  const card = element(
    "article",
    { class: "card chunk" },
    element("div", { class: "query" }, title, text),
    element("div", { class: "found" }, ...(found.length ? found : [nothing])),
  );
  reachable(text);
  roving(text, "mark");
  linkRuns(card);
  return card;
}

function neighborCard(neighbor, rank) {
  const length = Array.from(neighbor.text).length;
  const pieces = cut(neighbor.text + neighbor.continuation, marksOf(neighbor, rank, "neighbor"), length);
  const block = (kind, part) => element("pre", { class: kind, ...language(neighbor.text) }, ...marked(part));
  const card = element(
    "section",
    { class: "neighbor", "aria-label": `Neighbor ${rank + 1}` },
    element("h4", {}, element("span", { class: "rank" }, rank + 1), documentLink(neighbor)),
    neighbor.source && element("p", { class: "source" }, sourceText(neighbor.source)),
    measures(neighbor),
    block("text", pieces.filter(({ start }) => start < length)),
    neighbor.continuation && element("p", { class: "label" }, "continues"),
    neighbor.continuation && block("continuation", pieces.filter(({ start }) => start >= length)),
  );
  reachable(card);
  roving(card, "mark");
  return card;
}

/** Marks of the token runs that a chunk and its neighbor share, in the text of one of them. */
function marksOf({ spans }, rank, side) {
  return spans.map((span, number) => ({ start: span[side][0], stop: span[side][1], key: `${rank}.${number}`, tokens: span.tokens }));
}

function measures({ score, distance, overlap }) {
  const bar = element("span", { class: "meter", "aria-hidden": "true" });
  bar.style.setProperty("--share", overlap);
  const pair = (name, help, ...value) => element("div", { title: help }, element("dt", {}, name), element("dd", {}, ...value));
  return element(
    "dl",
    { class: "measures" },
    pair("score", "Neighbors are ordered by it; larger is nearer.", fixed(score, 3)),
    pair("distance", "Squared distance of the unit vectors, 0 to 4.", fixed(distance, 3)),
    pair("overlap", "Length of the longest shared token run divided by the chunk's length.", percent(overlap), bar),
  );
}

function documentLink({ document_id: id, title, chunk_id: chunk }) {
  const name = title || id || `chunk ${chunk}`;
  if (!id) return element("span", {}, name);
  return element("a", { href: addressOf("document", { id, parameters: { chunk: String(chunk) } }), ...language(name) }, name);
}
