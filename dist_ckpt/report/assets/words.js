"use strict";
// Numbers and times in words, as the command line says them; elements whose text is only ever text.

const words = (() => {
  const NONE = "–";

  function duration(secs) {
    if (secs === null || secs === undefined || !Number.isFinite(secs)) return NONE;
    if (secs < 60) return `${Math.max(secs, 0).toFixed(secs < 10 ? 1 : 0)} s`;
    const minutes = Math.round(secs / 60);
    for (const [unit, length, lower, lowerLength] of [["d", 1440, "h", 60], ["h", 60, "min", 1]]) {
      if (minutes >= length) {
        const rest = Math.floor((minutes % length) / lowerLength);
        return `${Math.floor(minutes / length)} ${unit}${rest ? ` ${rest} ${lower}` : ""}`;
      }
    }
    return `${minutes} min`;
  }

  const ago = (secs) =>
    secs === null || secs === undefined ? NONE : secs < 1 ? "just now" : `${duration(secs)} ago`;

  function bytes(count) {
    if (count === null || count === undefined) return NONE;
    if (count < 1000) return `${count} B`;
    let value = count, unit = "B";
    for (unit of ["B", "kB", "MB", "GB", "TB", "PB"]) {
      if (value < 999.95) break;
      value /= 1000;
    }
    return `${value.toFixed(1)} ${unit}`;
  }

  const whole = (value) =>
    value === null || value === undefined ? NONE : String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u2009");

  const count = (number, one, many = `${one}s`) => `${whole(number)} ${number === 1 ? one : many}`;

  /** A number with so many digits, without zeros that say nothing. */
  const number = (value, digits = 6) =>
    value === null || value === undefined ? "not finite" : digits >= 17 || typeof value !== "number" ? String(value) : String(Number(value.toPrecision(digits)));

  const clock = new Intl.DateTimeFormat([], {dateStyle: "medium", timeStyle: "short"}); // dear to make

  const hour = new Intl.DateTimeFormat([], {timeStyle: "short"});

  const LAST_SECS = 8.64e12; // no Date is later

  /** When something ends: the time alone where that is within the day. */
  const soon = (from, secs) => moment(from + secs, secs < 64800 ? hour : clock);

  const moment = (secs, format = clock) =>
    Number.isFinite(secs) && Math.abs(secs) <= LAST_SECS ? format.format(secs * 1000) : NONE;

  /** Return a new element. Children are nodes or texts. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "onclick") made.addEventListener("click", value);
      else made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.map((child) => (child instanceof Node ? child : String(child ?? NONE))));
    return made;
  }

  const at = (id) => document.getElementById(id);

  return {NONE, duration, ago, bytes, whole, count, number, moment, soon, element, at};
})();
