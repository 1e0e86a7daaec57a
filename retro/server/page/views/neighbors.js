// "What it finds": the chunks of a text, each next to its neighbors.

import { post, served, whenServed } from "../lib/api.js";
import { element, language } from "../lib/elements.js";
import { roving } from "../lib/keyboard.js";
import { counted, fixed } from "../lib/numbers.js";
import { offerDatastores } from "../parts/datastore_choice.js";
import { downloadButton } from "../parts/download.js";
import { chosenFilters, filterRows } from "../parts/filters.js";
import { codePoints, cut, linkRuns, marked, reachable } from "../parts/marks.js";
import { groupedCopies, isNearCopy } from "../parts/near_copies.js";
import { neighborCard, SIMILARITY } from "../parts/neighbor.js";
import { queryForm } from "../parts/query_form.js";
import { fill, notice } from "../parts/region.js";
import { LEAST_RUN } from "../parts/shared_runs.js";
import { strip } from "../parts/strip.js";
import { wordsIn } from "../parts/words.js";

const SCORES = {
  dense: ["similarity", SIMILARITY],
  sparse: ["BM25 score", "BM25 score: the weight of the words that two chunks have in common. Rare words weigh more. There is no upper limit."],
  hybrid: ["combined score", "Combined score: words in common (BM25, at most 1) plus the weighted similarity of the vectors."],
};

const LONGEST_QUESTION = 32; // tokens

const view = document.getElementById("neighbors");
const form = view.querySelector("form");
const results = view.querySelector(".results");

export const show = queryForm(form, "neighbors", search);
whenServed(({ retrieval }) => {
  for (const option of form.elements.retrieval.options) option.hidden = option.disabled = !retrieval.includes(option.value);
  if (!retrieval.includes(form.elements.retrieval.value)) form.elements.retrieval.value = retrieval[0] ?? "dense"; // The server's error names the missing stage.
});
filterRows(form.querySelector(".filters"), form);
offerDatastores(form);

function search(values) {
  fill(results, "Searching for neighbors…", async (signal) => {
    // It decides which kinds of retrieval there are, perhaps after the form was sent.
    const [{ retrieval: kinds }, wanted] = [await served(), values.get("retrieval") ?? form.elements.retrieval.value];
    const body = {
      text: values.get("text"),
      k: Number(values.get("k") ?? form.elements.k.value),
      retrieval: kinds.includes(wanted) ? wanted : form.elements.retrieval.value,
      datastore: values.get("datastore") ?? "",
      filters: chosenFilters(values),
    };
    const answer = await post("neighbors", body, signal);
    const { chunks, partial, missing } = answer;
    const isQuestion = chunks.length === 1 && chunks[0].tokens <= LONGEST_QUESTION;
    const found = chunks.reduce((sum, chunk) => sum + chunk.neighbors.length, 0);
    const summary = `${counted(chunks.length, "chunk")}, ${counted(found, "neighbor")}`;
    const warning = partial ? notice("Partial results", `Parts of the index did not answer: ${missing.join(", ")}.`) : null;
    const cards = chunks.map((chunk, number) => chunkCard(chunk, number, chunks.length, SCORES[body.retrieval][0], isQuestion));
    const save = downloadButton("neighbors", () => ({ request: body, ...answer }));
    const line = strip("neighbors-strip", [element("span", {}, summary)], [legend(SCORES[body.retrieval][1], isQuestion), element("p", {}, save)]);
    return { nodes: [line, warning, ...cards].filter(Boolean), summary: `${summary} found.` };
  });
}

function legend(score, isQuestion) {
  const sample = element("mark", { "data-ranks": "2" }, "Marked");
  sample.style.setProperty("--run", 0.8);
  return element(
    "ul",
    { class: "legend-list" },
    element("li", {}, sample, ` text occurs in the chunk and in the neighbor with this number: at least ${LEAST_RUN} tokens in a row. The longer, the stronger the color.`),
    isQuestion ? element("li", {}, element("mark", { class: "word" }, "Underlined"), " words are in your question, perhaps with another ending.") : "",
    element("li", {}, strength(0.6), ` Bar: the ${score.split(":")[0].toLowerCase()} compared with the best neighbor.`),
    element("li", {}, score),
  );
}

/** A card with a chunk on the left and its neighbors on the right; on a phone, one above the other. */
function chunkCard(chunk, number, total, scoreName, isQuestion) {
  const marks = chunk.neighbors.map((neighbor, rank) => marksOf(neighbor, rank));
  const words = (neighbor, rank) => (isQuestion ? wordMarks(chunk.text, neighbor, rank) : []);
  const best = Math.max(...chunk.neighbors.map(({ score }) => score));
  const text = element("pre", { class: "text", ...language(chunk.text) }, ...marked(cut(chunk.text, marks.flatMap((each) => each.chunk)), true));
  const cards = chunk.neighbors.map((neighbor, rank) => ({ neighbor, rank, card: cardOf(chunk, neighbor, rank, [marks[rank].neighbor, words(neighbor, rank)], [scoreName, neighbor.score / best]) }));
  const nothing = notice("No neighbors", "No chunk of the datastore passes the filters, or the chunk has no text.");
  const title = element("h3", {}, isQuestion ? "Your question " : `Chunk ${number + 1} of ${total} `, element("small", {}, counted(chunk.tokens, "token")));
  const card = element(
    "article",
    { class: isQuestion ? "card chunk question" : "card chunk" },
    element("div", { class: "query" }, title, text),
    element("div", { class: "found" }, ...(cards.length ? folded(cards) : [nothing])),
  );
  reachable(text);
  roving(text, "mark:not(.gap)");
  linkRuns(card);
  return card;
}

/** The cards of the neighbors. Near copies of an earlier one, and other chunks of the same document, are folded below it. */
function folded(cards) {
  const copied = groupedCopies(cards, ({ neighbor }) => neighbor.text).map(([first, ...copies]) => ({ ...first, folds: copiesOf(first, copies) }));
  const documents = Map.groupBy(copied, ({ neighbor: { document_id: id, chunk_id: chunk } }) => id || chunk);
  return [...documents.values()].map(([first, ...others]) =>
    element("div", { class: "document-hits", "data-document": first.neighbor.document_id }, first.card, ...first.folds, ...othersOf(others)),
  );
}

function copiesOf(first, copies) {
  const title = `${copies.length === 1 ? "Neighbor" : "Neighbors"} ${ranksOf(copies)}: almost the same text as neighbor ${first.rank + 1}`;
  return fold("copies", title, copies.map(({ card }) => card));
}

function othersOf(others) {
  const title = `${others.length === 1 ? "Neighbor" : "Neighbors"} ${ranksOf(others)}: in the same document`;
  return fold("others", title, others.flatMap(({ card, folds }) => [card, ...folds]));
}

const ranksOf = (cards) => cards.map(({ rank }) => rank + 1).join(", ");
const fold = (kind, title, cards) => (cards.length ? [element("details", { class: `fold ${kind}` }, element("summary", {}, title), ...cards)] : []);

function cardOf(chunk, neighbor, rank, [runs, words], [scoreName, share]) {
  const longest = runs.reduce((most, { tokens }) => Math.max(most, tokens), 0);
  const fact = (name, value) => element("span", {}, `${name} `, element("b", {}, value));
  const facts = [strength(share), fact(scoreName, fixed(neighbor.score, 2)), longest ? fact("longest shared run", `${longest} of ${counted(chunk.tokens, "token")}`) : null];
  if (!longest && !words.length) facts.push(element("span", {}, `no shared run of ${LEAST_RUN} tokens`));
  if (isNearCopy(chunk.text, neighbor.text)) facts.push(element("span", { class: "badge" }, "almost the same text as yours"));
  return neighborCard(neighbor, rank, [...runs, ...words], facts.filter(Boolean));
}

/** A bar: the strength of a hit as a share of the best one's. */
function strength(share) {
  const bar = element("span", { class: "strength", "aria-hidden": "true" }, element("span"));
  bar.firstChild.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return bar;
}

/** Marks of a question's words in a neighbor. */
function wordMarks(question, { text, continuation }, rank) {
  const whole = text + continuation;
  const place = (at) => codePoints(whole.slice(0, at));
  return wordsIn(question, whole).map(({ start, stop }) => ({ start: place(start), stop: place(stop), key: `word.${rank}.${start}`, tokens: 1, rank, word: true }));
}

/** Marks of the token runs that a chunk and its neighbor share, in the texts of both. */
function marksOf({ spans }, rank) {
  const long = spans.filter(({ tokens }) => tokens >= LEAST_RUN);
  const on = (side) => long.map((span, number) => ({ start: span[side][0], stop: span[side][1], key: `${rank}.${number}`, tokens: span.tokens, rank }));
  return { chunk: on("chunk"), neighbor: on("neighbor") };
}
