// The Document view: one page of a stored document's chunks, with the found chunk highlighted, or a run marked.

import { addressOf } from "../lib/address.js";
import { get } from "../lib/api.js";
import { element, valueTable, language, sourceText } from "../lib/elements.js";
import { count, tableRows } from "../lib/numbers.js";
import { codePoints, cut, marked as markedText } from "../parts/marks.js";
import { fill } from "../parts/region.js";

const PAGE = 8;

const results = document.querySelector("#document .results");
const back = document.querySelector("#document .back");

/**
 * @param {URLSearchParams} parameters `chunk`: id of the chunk to highlight; `first`: first chunk of the page (default: the page with
 *   `chunk`); `start`, `stop`: characters of a run that begins in `chunk` and ends in the chunk `last`
 * @param {string} id of the document
 */
export function show(parameters, id) {
  const marked = parameters.has("chunk") ? Number(parameters.get("chunk")) : null;
  const run = parameters.has("last") ? ["start", "last", "stop"].map((name) => Number(parameters.get(name))) : null;
  back.href = addressOf(run ? "trace" : "neighbors");
  back.textContent = run ? "← Trace" : "← What it finds";
  return fill(results, "Loading the document…", async (signal) => {
    const first = parameters.has("first") ? Number(parameters.get("first")) : await pageOf(id, marked, run, signal);
    const stored = await read(id, first, PAGE, signal);
    const name = stored.title || id;
    document.title = `${name} · retro`;
    const title = element("h2", { tabindex: -1, ...language(name) }, name);
    const rows = Object.entries(stored.metadata).flatMap(([key, value]) => tableRows(key, value));
    const about = element("details", { class: "about-document" }, element("summary", {}, "Metadata"), valueTable("Metadata", rows));
    const source = stored.source ? element("p", { class: "source" }, sourceText(stored.source)) : "";
    const chunks = stored.chunks.map((chunk, number) => chunkCard(chunk, stored.first + number, marked, run));
    const nodes = [element("header", {}, title, source, about), pages(stored, parameters, "Pages"), ...chunks];
    if (chunks.length > 2) nodes.push(pages(stored, parameters, "Pages, below the text"));
    const focus = chunks.find((card) => card.hasAttribute("aria-current")) ?? title;
    return { nodes, summary: `${name}, ${range(stored)}.`, focus };
  });
}

const read = (id, first, number, signal) => get(`documents?${new URLSearchParams({ id, first, count: number })}`, signal);

/**
 * First chunk of the page with a chunk: pages have equal lengths, but one with a run begins two chunks before it. The chunks of a
 * document have consecutive ids, so the first chunk's id is enough.
 */
async function pageOf(id, chunk, run, signal) {
  if (chunk === null) return 0;
  const { chunks, num_chunks: total } = await read(id, 0, 1, signal);
  const position = chunk - chunks[0].chunk_id;
  if (position < 0 || position >= total) return 0;
  return run ? Math.max(0, position - 2) : position - (position % PAGE);
}

function chunkCard({ text, chunk_id: chunk }, position, marked, run) {
  const found = chunk === marked;
  const label = element("p", { class: "label" }, `Chunk ${position + 1}`, found ? element("b", {}, run ? "the run begins here" : "found neighbor") : "");
  const attributes = found ? { class: "card stored found", "aria-current": "true", tabindex: -1 } : { class: "card stored" };
  return element("article", { ...attributes, id: `chunk-${chunk}` }, label, element("pre", { class: "text", ...language(text) }, ...withRun(text, chunk, marked, run)));
}

/** The nodes of a chunk's text, with its part of a run from the chunk `first` to the chunk `last` marked. */
function withRun(text, chunk, first, run) {
  if (!run || chunk < first || chunk > run[1]) return [text];
  const [start, last, stop] = run;
  const part = { start: chunk === first ? start : 0, stop: chunk === last ? stop : codePoints(text) };
  return markedText(cut(text, [{ ...part, key: "run", tokens: Infinity, rank: 0, about: "the run of your text" }]));
}

function pages(stored, parameters, label) {
  const { document_id: id, first, chunks, num_chunks: total } = stored;
  const link = (text, to, exists) => {
    if (!exists) return element("span", { class: "step", "aria-disabled": "true" }, text);
    const there = new URLSearchParams(parameters);
    there.set("first", Math.max(0, to));
    return element("a", { class: "step", href: addressOf("document", { id, parameters: there }) }, text);
  };
  return element(
    "nav",
    { class: "pages", "aria-label": label },
    link("← Previous", first - PAGE, first > 0),
    element("span", {}, range(stored)),
    link("Next →", first + PAGE, first + chunks.length < total),
  );
}

function range({ first, chunks, num_chunks: total }) {
  return chunks.length ? `chunks ${count(first + 1)} to ${count(first + chunks.length)} of ${count(total)}` : `no chunks on this page; the document has ${count(total)}`;
}
