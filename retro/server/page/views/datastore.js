// The Datastore view: totals, measured recall of the index, the model, and the server's limits.

import { served } from "../lib/api.js";
import { element, valueTable, figures } from "../lib/elements.js";
import { bytes, count, tableRows, words } from "../lib/numbers.js";
import { fill } from "../parts/region.js";

/** Names and meanings of values whose own names are not clear. */
const MEANINGS = {
  fingerprint: "fingerprint (identifies the contents)",
  "recall at 10": "recall at 10 (share of the 10 nearest chunks of an exact search that the index finds)",
  index: "index (kind of Faiss index, and the number of its lists that a search reads)",
  "chunk length": "tokens in a chunk",
  "vocab size": "tokens in the vocabulary",
  dimension: "numbers in the vector of a chunk",
  filters: "columns to filter by",
  step: "training steps",
  parameters: "parameters (trained numbers of the model)",
  context: "context (tokens that the model reads at once)",
  retrieval: "reads neighbors",
  "max body bytes": "size of a request",
  "max queries": "texts to search for",
  "max k": "neighbors per chunk, when searching",
  "max model k": "neighbors per chunk, for the model",
  "max neighbor tokens": "tokens of all neighbors",
  "max candidates": "candidates of a search",
  "max characters": "characters of all texts",
  "max input tokens": "tokens of all texts",
  "max tokens": "tokens to write",
  "request seconds": "seconds until an answer",
};

const results = document.querySelector("#datastore .results");

export const show = () =>
  fill(results, "Loading information about the datastore…", async () => {
    const answer = await served();
    const { datastores, model, limits, filters, chunk_length, vocab_size, embedder, dimension } = answer;
    const common = { chunk_length, vocab_size, embedder, dimension, filters };
    const sections = [
      figures(totals(datastores)),
      ...datastores.map((each, number) => table(each.name ?? `Datastore ${number + 1}`, each)),
      table("Chunks and embeddings", common),
      model ? table("Model", model) : element("section", {}, element("h3", {}, "Model"), element("p", {}, "No model: the server was started without a checkpoint.")),
      table("Limits of a request", limits),
    ];
    return { nodes: sections, summary: "Datastore information loaded." };
  });

/** Sums of the counts over all datastores. */
function totals(datastores) {
  const sum = (key) => datastores.reduce((total, each) => total + (each[key] ?? 0), 0);
  const counts = ["documents", "chunks", "tokens"].map((key) => ({ label: words(key), value: count(sum(key)) }));
  return [...counts, { label: "text", value: bytes(sum("bytes")) }].filter(({ value }) => value !== "0");
}

function table(title, values) {
  const rows = Object.entries(values).flatMap(([key, value]) => (key === "name" && value === title ? [] : tableRows(key, value)));
  const named = rows.map(([name, value]) => [MEANINGS[name] ?? name, value]);
  return element("section", {}, element("h3", {}, title), element("div", { class: "card" }, valueTable(title, named)));
}
