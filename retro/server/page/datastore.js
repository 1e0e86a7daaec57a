// The view of the datastore: totals, what the index was measured to find, the model, and what the server allows.

import { served } from "./api.js";
import { element, factTable, figures } from "./elements.js";
import { bytes, count, facts, words } from "./numbers.js";
import { fill } from "./region.js";

const results = document.querySelector("#datastore .results");

export const show = () =>
  fill(results, "Reading what is served…", async () => {
    const answer = await served();
    const { datastores, model, limits, filters, chunk_length, vocab_size, embedder, dimension } = answer;
    const common = { chunk_length, vocab_size, embedder, dimension, filters };
    const sections = [
      figures(totals(datastores)),
      ...datastores.map((each, number) => table(each.name ?? `Datastore ${number + 1}`, each)),
      table("Chunks and embeddings", common),
      model ? table("Model", model) : element("section", {}, element("h3", {}, "Model"), element("p", {}, "None: the server was started without a checkpoint.")),
      table("Limits of a request", limits),
    ];
    return { nodes: sections, summary: "What is served is shown." };
  });

/** Sums over the datastores of what each of them counts. */
function totals(datastores) {
  const sum = (key) => datastores.reduce((total, each) => total + (each[key] ?? 0), 0);
  const counts = ["documents", "chunks", "tokens"].map((key) => [words(key), count(sum(key))]);
  return [...counts, ["text", bytes(sum("bytes"))]].filter(([, value]) => value !== "0");
}

function table(title, values) {
  const rows = Object.entries(values).flatMap(([key, value]) => (key === "name" && value === title ? [] : facts(key, value)));
  return element("section", {}, element("h3", {}, title), element("div", { class: "card" }, factTable(title, rows)));
}
