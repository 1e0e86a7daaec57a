// Format numbers and names for people.

const integers = new Intl.NumberFormat("en");

/** @param {number} value @returns {string} 1234567 → 1,234,567 */
export const count = (value) => integers.format(value);

const large = new Intl.NumberFormat("en", { notation: "compact", compactDisplay: "long" });

/** @param {number} value @returns {string} 1853982 → 1.9 million */
export const roughly = (value) => large.format(value);

/** @param {number} value @param {string} noun @returns {string} 1 chunk, 2 chunks */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** @param {number} value @param {number} digits @returns {string} with a true minus sign */
export const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=0(\.0*)?$)/, "").replace("-", "−");

/** @param {number} value a fraction of 1 @param {number} [digits] @returns {string} */
export const percent = (value, digits = 0) => `${fixed(100 * value, digits)}%`;

/** @param {number} value a probability @returns {string} with two significant digits: 62%, 0.034% */
export function probability(value) {
  if (value < 1e-8) return "below 0.000001%";
  return value >= 0.1 ? percent(value) : `${Number((100 * value).toPrecision(2)).toFixed(Math.max(0, 1 - Math.floor(Math.log10(100 * value))))}%`;
}

/** Bits of a difference of log-probabilities in nats. @param {number} nats @returns {number} */
export const bitsOf = (nats) => nats / Math.LN2;

/**
 * A change in bits in words. Fewer bits are better everywhere on this page.
 *
 * @param {number} bits above 0: fewer bits are needed
 * @returns {{text: string, kind: "helped" | "hurt" | ""}}
 */
export function verdict(bits) {
  if (bits === 0) return { text: "no change", kind: "" };
  const amount = fixed(Math.abs(bits), 2);
  return bits > 0 ? { text: `${amount} fewer bits: helped`, kind: "helped" } : { text: `${amount} more bits: hurt`, kind: "hurt" };
}

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
