// Elements and numbers.

export const byId = (id) => document.getElementById(id);

/** Return a new element. `content`: nodes and texts. */
export function element(tag, className = "", ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

/** Return a new SVG element. */
export function svg(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Set the text of an element, if it differs. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/**
 * Make the children of `list` correspond to `items`, in order, and reuse those of earlier calls.
 * `make` returns the element of a new item, and `update` changes it.
 */
export function synchronize(list, items, keyOf, make, update) {
  const focused = document.activeElement;
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  let previous = null;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    update(child, item);
    const next = previous ? previous.nextSibling : list.firstChild;
    if (child !== next) list.insertBefore(child, next);
    previous = child;
  }
  for (const gone of known.values()) gone.remove();
  // An element loses its focus when it is moved.
  if (list.contains(focused) && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

const integers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Return a number rounded to an integer. */
export const whole = (value) => integers.format(value);

/** Return a count with at most four digits, such as 12.3k. */
export function count(value) {
  if (value < 10_000) return whole(value);
  const units = [["G", 1e9], ["M", 1e6], ["k", 1e3]];
  const [unit, size] = units.find(([, size]) => value >= size * 0.9995);
  return `${digits(value / size)}${unit}`;
}

/** Return a number of bytes in decimal units. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at ? digits(value) : whole(value)} ${units[at]}`;
}

/** Return a duration. */
export function duration(seconds) {
  if (seconds < 0.0995) return `${digits(seconds * 1000)} ms`;
  if (seconds < 0.9995) return `${whole(seconds * 1000)} ms`;
  return seconds < 99.5 ? `${digits(seconds)} s` : `${whole(seconds)} s`;
}

/** Return a number with about three digits. */
export function digits(value) {
  if (value === 0) return "0";
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

/** Moving average of a rate, so that short bursts remain visible. */
export class Smoothed {
  value = 0;
  peak = 0;

  update(rate) {
    this.value += 0.4 * (rate - this.value);
    this.peak = Math.max(this.value, this.peak);
    if (rate === 0 && this.value < 0.02 * this.peak) this.value = this.peak = 0;
    return this.value;
  }
}

/** Return a message of the gateway as a sentence. */
export function sentence(message) {
  return message && message[0].toUpperCase() + message.slice(1).replace(/\.?$/, ".");
}

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
