// Filters on the documents' metadata. Each row has a column and a value; rows of one column are combined with OR, columns with AND.

import { get, whenServed } from "../lib/api.js";
import { element } from "../lib/elements.js";

/**
 * Connect the filter rows of a form. Their fields are named `column` and `value`, so forms and addresses keep their order.
 *
 * @param {HTMLElement} group contains `.rows` and a button that adds a row
 * @param {HTMLFormElement} form
 */
export function filterRows(group, form) {
  const rows = group.querySelector(".rows");
  const add = (columns) => rows.append(row(columns));
  whenServed(({ filters }) => {
    group.hidden = filters.length === 0;
    group.querySelector("button").addEventListener("click", () => {
      add(filters);
      rows.lastElementChild.querySelector("select").focus();
    });
  });
  form.addEventListener("restore", ({ detail: parameters }) => {
    const names = parameters.getAll("column");
    rows.replaceChildren(...names.map((name) => row([name])));
    whenServed(({ filters }) => rows.querySelectorAll("select").forEach((select) => offer(select, filters)));
  });
}

/**
 * Convert a form's filters to the format of the API. Types follow the notation: 12 is a number, true a boolean, "12" a text.
 *
 * @param {URLSearchParams} values
 * @returns {Record<string, unknown>}
 */
export function chosenFilters(values) {
  const filters = {};
  const given = values.getAll("value");
  values.getAll("column").forEach((column, number) => (filters[column] ??= []).push(typed(given[number] ?? "")));
  return filters;
}

function typed(text) {
  const quoted = /^"(.*)"$/s.exec(text);
  if (quoted) return quoted[1];
  if (text === "true" || text === "false") return text === "true";
  return text.trim() && Number.isFinite(Number(text)) ? Number(text) : text;
}

/** The notation of a value: texts that look like numbers or booleans are quoted. */
const written = (value) => (typeof value === "string" && typeof typed(value) !== "string" ? `"${value}"` : String(value));

let lists = 0;

function row(columns) {
  const select = element("select", { name: "column", "aria-label": "Column" });
  offer(select, columns);
  const list = element("datalist", { id: `values-${lists++}` });
  const value = element("input", { name: "value", required: true, "aria-label": "Value", list: list.id, placeholder: "choose or type" });
  const line = element(
    "div",
    { class: "filter" },
    select,
    element("span", { "aria-hidden": "true" }, "is"),
    value,
    list,
    element("button", { type: "button", class: "quiet", "aria-label": "Remove this filter", click: () => line.remove() }, "×"),
  );
  const suggest = suggestions(select, value, list);
  for (const event of ["focus", "input"]) value.addEventListener(event, suggest);
  select.addEventListener("change", suggest);
  return line;
}

/** Return a function that offers the column's values which contain the typed text. A new call cancels the previous one. */
function suggestions(select, value, list) {
  let control = new AbortController();
  return async () => {
    control.abort();
    control = new AbortController();
    const { signal } = control;
    const asked = new URLSearchParams({ column: select.value, contains: value.value, count: 30 });
    try {
      const { values } = await get(`filter-values?${asked}`, signal);
      list.replaceChildren(...values.map((each) => element("option", { value: written(each) })));
    } catch (error) {
      if (!signal.aborted) list.replaceChildren(); // Without suggestions, a value can still be typed.
    }
  };
}

/** Set the options of a select to the available columns and keep the selected one. */
function offer(select, columns) {
  const chosen = select.value;
  select.replaceChildren(...[...new Set([chosen, ...columns])].filter(Boolean).map((column) => element("option", {}, column)));
  if (chosen) select.value = chosen;
}
