// The view of a stored document: its chunks a page at a time, the one that was found marked.

import { addressOf } from "./address.js";
import { get } from "./api.js";
import { element, factTable, language, sourceText } from "./elements.js";
import { count, facts } from "./numbers.js";
import { fill } from "./region.js";

const PAGE = 8;

const results = document.querySelector("#document .results");

/**
 * @param {URLSearchParams} parameters `chunk`: the id of the one to mark; `first`: where the page begins, else where the mark is
 * @param {string} id of the document
 */
export function show(parameters, id) {
  const marked = parameters.has("chunk") ? Number(parameters.get("chunk")) : null;
  return fill(results, "Reading the document…", async (signal) => {
    const first = parameters.has("first") ? Number(parameters.get("first")) : await pageOf(id, marked, signal);
    const stored = await read(id, first, PAGE, signal);
    const name = stored.title || id;
    document.title = `${name} · retro`;
    const title = element("h2", { tabindex: -1, ...language(name) }, name);
    const rows = Object.entries(stored.metadata).flatMap(([key, value]) => facts(key, value));
    const about = element("details", { class: "about" }, element("summary", {}, "Metadata"), factTable("Metadata", rows));
    const source = stored.source ? element("p", { class: "source" }, sourceText(stored.source)) : "";
    const chunks = stored.chunks.map((chunk, number) => chunkCard(chunk, stored.first + number, chunk.chunk_id === marked));
    const nodes = [element("header", {}, title, source, about), pages(stored, marked, "Pages"), ...chunks];
    if (chunks.length > 2) nodes.push(pages(stored, marked, "Pages, below the text"));
    const focus = chunks.find((card) => card.hasAttribute("aria-current")) ?? title;
    return { nodes, summary: `${name}, ${range(stored)}.`, focus };
  });
}

const read = (id, first, number, signal) => get(`documents?${new URLSearchParams({ id, first, count: number })}`, signal);

/** Where the page with a chunk begins. The chunks of a document have consecutive ids, so its first chunk's id tells. */
async function pageOf(id, chunk, signal) {
  if (chunk === null) return 0;
  const { chunks, num_chunks: total } = await read(id, 0, 1, signal);
  const position = chunk - chunks[0].chunk_id;
  return position >= 0 && position < total ? position - (position % PAGE) : 0;
}

function chunkCard({ text, chunk_id: chunk }, position, found) {
  const label = element("p", { class: "label" }, `Chunk ${position + 1}`, found ? element("b", {}, "the neighbor that was found") : "");
  const attributes = found ? { class: "card stored found", "aria-current": "true", tabindex: -1 } : { class: "card stored" };
  return element("article", { ...attributes, id: `chunk-${chunk}` }, label, element("pre", { class: "text", ...language(text) }, text));
}

function pages(stored, marked, label) {
  const { document_id: id, first, chunks, num_chunks: total } = stored;
  const link = (text, to, there) => {
    if (!there) return element("span", { class: "step", "aria-disabled": "true" }, text);
    const parameters = { ...(marked !== null && { chunk: marked }), first: Math.max(0, to) };
    return element("a", { class: "step", href: addressOf("document", { id, parameters }) }, text);
  };
  return element(
    "nav",
    { class: "pages", "aria-label": label },
    link("← Earlier", first - PAGE, first > 0),
    element("span", {}, range(stored)),
    link("Later →", first + PAGE, first + chunks.length < total),
  );
}

function range({ first, chunks, num_chunks: total }) {
  return chunks.length ? `chunks ${count(first + 1)} to ${count(first + chunks.length)} of ${count(total)}` : `no chunks here, there are ${count(total)}`;
}
