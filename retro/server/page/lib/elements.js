// Create DOM nodes from data. Data is always inserted as text: no code of this page parses it as HTML.

/**
 * Create an element with attributes and children. Attributes have their HTML names (`class`, `data-…`, `aria-…`). Functions
 * become event listeners (`click`). Children that are not nodes become text.
 *
 * @param {string} name
 * @param {Record<string, unknown>} [attributes] null, undefined and false are ignored
 * @param {...(Node | string | number | null)} children
 * @returns {HTMLElement}
 */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/**
 * Attributes for an element with text of unknown language and direction.
 *
 * @param {string} text
 * @returns {{lang: string, dir: string}}
 */
export function language(text) {
  const scripts = [[/[\p{Script=Hiragana}\p{Script=Katakana}]/u, "ja"], [/\p{Script=Hangul}/u, "ko"], [/\p{Script=Han}/u, "zh"]];
  return { lang: scripts.find(([pattern]) => pattern.test(text))?.[1] ?? "", dir: "auto" };
}

/** A name as nodes that break after `/`, `.`, `_` and `-`. @param {string} name @returns {Node[]} */
export const breakable = (name) => name.split(/(?<=[/._-])/u).flatMap((part) => [document.createTextNode(part), element("wbr")]);

/**
 * The source of a document: a link if it is a web address, otherwise plain text.
 *
 * @param {string} source
 * @returns {HTMLElement}
 */
export function sourceText(source) {
  if (!/^https?:\/\//i.test(source)) return element("span", {}, source);
  return element("a", { href: source, target: "_blank", rel: "noopener noreferrer" }, source);
}

/**
 * A table of names and values, with a caption for screen readers.
 *
 * @param {string} caption
 * @param {[string, string][]} rows name and value
 * @returns {HTMLElement}
 */
export function valueTable(caption, rows) {
  const body = rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)));
  return element("table", {}, element("caption", { class: "visually-hidden" }, caption), element("tbody", {}, ...body));
}

/**
 * A row of key figures.
 *
 * @param {{label: string, value: string, kind?: string, note?: string}[]} items `kind`: CSS class of the value; `note`: its meaning
 * @returns {HTMLElement}
 */
export function figures(items) {
  const cards = items.map(({ label, value, kind, note }) =>
    element(
      "div",
      { class: "card figure" },
      element("dt", {}, label),
      element("dd", { class: kind }, value),
      note ? element("dd", { class: "note" }, note) : null,
    ),
  );
  return element("dl", { class: "figures" }, ...cards);
}
