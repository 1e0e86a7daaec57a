// The Datastore view: totals, measured recall of the index, the model, and the server's limits.

import { served } from "./api.js";
import { element, valueTable, figures } from "./elements.js";
import { bytes, count, tableRows, words } from "./numbers.js";
import { fill } from "./region.js";

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
  const counts = ["documents", "chunks", "tokens"].map((key) => [words(key), count(sum(key))]);
  return [...counts, ["text", bytes(sum("bytes"))]].filter(([, value]) => value !== "0");
}

function table(title, values) {
  const rows = Object.entries(values).flatMap(([key, value]) => (key === "name" && value === title ? [] : tableRows(key, value)));
  return element("section", {}, element("h3", {}, title), element("div", { class: "card" }, valueTable(title, rows)));
}
