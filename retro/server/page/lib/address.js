// The URL's hash names the current view: #/VIEW, #/VIEW?parameters, #/document/ID?parameters.

/**
 * @typedef {object} Address
 * @property {string} view empty if the hash names none
 * @property {string} id the part after the view, decoded
 * @property {URLSearchParams} parameters
 */

/** @returns {Address} */
export function readAddress() {
  const [path, query = ""] = split(location.hash.replace(/^#\/?/, ""), "?");
  const [view, id = ""] = split(path, "/");
  return { view, id: decode(id), parameters: new URLSearchParams(query) };
}

/**
 * @param {string} view
 * @param {{id?: string, parameters?: URLSearchParams | Record<string, string>}} [rest]
 * @returns {string} `#/…`
 */
export function addressOf(view, { id = "", parameters = {} } = {}) {
  const query = new URLSearchParams(parameters).toString();
  return `#/${view}${id && `/${encodeURIComponent(id)}`}${query && `?${query}`}`;
}

/**
 * Write an address to the address bar without navigating. Addresses that are too long for browsers lose their parameters.
 *
 * @param {string} view
 * @param {URLSearchParams} parameters
 * @param {"pushState" | "replaceState"} how
 */
export function writeAddress(view, parameters, how) {
  const full = addressOf(view, { parameters });
  history[how](null, "", full.length < 100_000 ? full : addressOf(view));
}

function split(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // A user typed a % into the address.
  }
}
