// Format numbers and names for people.

const integers = new Intl.NumberFormat("en");

/** @param {number} value @returns {string} 1234567 → 1,234,567 */
export const count = (value) => integers.format(value);

/** @param {number} value @param {string} noun @returns {string} 1 chunk, 2 chunks */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** @param {number} value @param {number} digits @returns {string} with a true minus sign */
export const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=0(\.0*)?$)/, "").replace("-", "−");

/** @param {number} value @param {number} digits @returns {string} with its sign, 0 without */
export function signed(value, digits) {
  const text = fixed(value, digits);
  return Number(value.toFixed(digits)) > 0 ? `+${text}` : text;
}

/** @param {number} value a fraction of 1 @param {number} [digits] @returns {string} */
export const percent = (value, digits = 0) => `${fixed(100 * value, digits)} %`;

/** @param {number} value @returns {string} 11586556 → 11.6 MB */
export function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return power ? `${(value / 1000 ** power).toFixed(1)} ${units[power]}` : `${value} bytes`;
}

/** @param {string} key @returns {string} a field's name as words */
export const words = (key) => key.replaceAll("_", " ");

/**
 * Table rows for a JSON value; nested values get their own rows.
 *
 * @param {string} key
 * @param {unknown} value
 * @returns {[string, string][]}
 */
export function tableRows(key, value) {
  if (value === null || value === undefined || value === "") return [];
  if (typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value).flatMap(([name, inner]) => tableRows(name.startsWith(key) ? name : `${key} ${name}`.trim(), inner));
  }
  return [[words(key), plain(key, value)]];
}

function plain(key, value) {
  if (Array.isArray(value)) return value.map((each) => plain("", each)).join(", ");
  if (typeof value !== "number") return typeof value === "boolean" ? (value ? "yes" : "no") : String(value);
  if (/(^|_)bytes$/.test(key)) return bytes(value);
  return Number.isInteger(value) ? count(value) : String(Number(value.toPrecision(4)));
}
