// "What it finds": the chunks of a text, each next to its neighbors.

import { post } from "../lib/api.js";
import { element, language } from "../lib/elements.js";
import { roving } from "../lib/keyboard.js";
import { counted, fixed } from "../lib/numbers.js";
import { offerDatastores } from "../parts/datastore_choice.js";
import { downloadButton } from "../parts/download.js";
import { chosenFilters, filterRows } from "../parts/filters.js";
import { cut, linkRuns, marked, reachable } from "../parts/marks.js";
import { groupedCopies, isNearCopy } from "../parts/near_copies.js";
import { neighborCard, SIMILARITY } from "../parts/neighbor.js";
import { queryForm } from "../parts/query_form.js";
import { fill, notice } from "../parts/region.js";
import { LEAST_RUN } from "../parts/shared_runs.js";

const SCORES = {
  dense: ["similarity", SIMILARITY],
  sparse: ["BM25 score", "BM25 score: the weight of the words that two chunks have in common. Rare words weigh more. There is no upper limit."],
  hybrid: ["combined score", "Combined score: words in common (BM25, at most 1) plus the weighted similarity of the vectors."],
};

const view = document.getElementById("neighbors");
const form = view.querySelector("form");
const results = view.querySelector(".results");

export const show = queryForm(form, "neighbors", search);
filterRows(form.querySelector(".filters"), form);
offerDatastores(form);

function search(values) {
  fill(results, "Searching for neighbors…", async (signal) => {
    const body = {
      text: values.get("text"),
      k: Number(values.get("k") ?? form.elements.k.value),
      retrieval: values.get("retrieval") ?? form.elements.retrieval.value,
      datastore: values.get("datastore") ?? "",
      filters: chosenFilters(values),
    };
    const answer = await post("neighbors", body, signal);
    const { chunks, partial, missing } = answer;
    const found = chunks.reduce((sum, chunk) => sum + chunk.neighbors.length, 0);
    const summary = `${counted(chunks.length, "chunk")}, ${counted(found, "neighbor")}`;
    const warning = partial ? notice("Partial results", `Parts of the index did not answer: ${missing.join(", ")}.`) : null;
    const cards = chunks.map((chunk, number) => chunkCard(chunk, number, chunks.length, SCORES[body.retrieval][0]));
    const about = element("div", { class: "summary" }, element("p", {}, summary), downloadButton("neighbors", () => ({ request: body, ...answer })));
    return { nodes: [about, legend(SCORES[body.retrieval][1]), warning, ...cards].filter(Boolean), summary: `${summary} found.` };
  });
}

function legend(score) {
  const sample = element("mark", { "data-ranks": "2" }, "Marked");
  sample.style.setProperty("--run", 0.8);
  return element(
    "ul",
    { class: "legend-list" },
    element("li", {}, sample, ` text occurs in the chunk and in the neighbor with this number: at least ${LEAST_RUN} tokens in a row. The longer, the stronger the color.`),
    element("li", {}, score),
  );
}

/** A card with a chunk on the left and its neighbors on the right; on a phone, one above the other. */
function chunkCard(chunk, number, total, scoreName) {
  const marks = chunk.neighbors.map((neighbor, rank) => marksOf(neighbor, rank));
  const text = element("pre", { class: "text", ...language(chunk.text) }, ...marked(cut(chunk.text, marks.flatMap((each) => each.chunk)), true));
  const cards = chunk.neighbors.map((neighbor, rank) => ({ neighbor, rank, card: cardOf(chunk, neighbor, rank, marks[rank].neighbor, scoreName) }));
  const nothing = notice("No neighbors", "No chunk of the datastore passes the filters, or the chunk has no text.");
  const title = element("h3", {}, `Chunk ${number + 1} of ${total} `, element("small", {}, counted(chunk.tokens, "token")));
  const card = element(
    "article",
    { class: "card chunk" },
    element("div", { class: "query" }, title, text),
    element("div", { class: "found" }, ...(cards.length ? folded(cards) : [nothing])),
  );
  reachable(text);
  roving(text, "mark");
  linkRuns(card);
  return card;
}

/** The cards of the neighbors; near copies of an earlier one are folded below it. */
function folded(cards) {
  return groupedCopies(cards, ({ neighbor }) => neighbor.text).flatMap(([first, ...copies]) => {
    if (!copies.length) return [first.card];
    const ranks = copies.map(({ rank }) => rank + 1).join(", ");
    const title = `${copies.length === 1 ? "Neighbor" : "Neighbors"} ${ranks}: almost the same text as neighbor ${first.rank + 1}`;
    return [first.card, element("details", { class: "copies" }, element("summary", {}, title), ...copies.map(({ card }) => card))];
  });
}

function cardOf(chunk, neighbor, rank, marks, scoreName) {
  const longest = marks.reduce((most, { tokens }) => Math.max(most, tokens), 0);
  const fact = (name, value) => element("span", {}, `${name} `, element("b", {}, value));
  const facts = [fact(scoreName, fixed(neighbor.score, 2)), longest ? fact("longest shared run", `${longest} of ${counted(chunk.tokens, "token")}`) : element("span", {}, `no shared run of ${LEAST_RUN} tokens`)];
  if (isNearCopy(chunk.text, neighbor.text)) facts.push(element("span", { class: "badge" }, "almost the same text as yours"));
  return neighborCard(neighbor, rank, marks, facts);
}

/** Marks of the token runs that a chunk and its neighbor share, in the texts of both. */
function marksOf({ spans }, rank) {
  const long = spans.filter(({ tokens }) => tokens >= LEAST_RUN);
  const on = (side) => long.map((span, number) => ({ start: span[side][0], stop: span[side][1], key: `${rank}.${number}`, tokens: span.tokens, rank }));
  return { chunk: on("chunk"), neighbor: on("neighbor") };
}
