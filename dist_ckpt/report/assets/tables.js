"use strict";
// What stands below the curve: events, attempts, generations, policy, samples.

const tables = (() => {
  const {element, at, whole, duration, ago, bytes, moment, number, NONE} = words;
  const FIRST_ROWS = 25;

  /** Fill a card with a table of the newest items; the rest is made when it is asked for. */
  function fill(name, heads, items, cellsOf, right = [], wide = []) {
    const kind = (head) => (right.includes(head) ? "right" : wide.includes(head) ? "wide" : null);
    at(`${name}-card`).hidden = items.length === 0;
    const body = element("tbody");
    const add = (from, to) => {
      for (const item of items.slice(from, to))
        body.append(element("tr", {}, ...cellsOf(item).map((cell, column) => element("td", {class: kind(heads[column])}, cell))));
    };
    const head = element("tr", {}, ...heads.map((text) => element("th", {scope: "col", class: kind(text)}, text)));
    const shown = Math.max(FIRST_ROWS, Number(at(name).dataset.shown ?? 0));
    add(0, shown);
    at(name).replaceChildren(element("table", {}, element("thead", {}, head), body));
    if (items.length > shown) {
      const more = element("button", {type: "button", class: "more", onclick: () => {
        at(name).dataset.shown = Infinity;
        add(shown, items.length);
        more.remove();
      }}, `show all ${whole(items.length)}`);
      at(name).append(more);
    }
  }

  function events(story, onShow) {
    const cells = ([kind, step, attempt, time, text]) => [
      element("span", {class: `mark ${kind}`}, `${chart.GLYPHS[kind]} ${kind}`),
      element("button", {type: "button", class: "link", title: "Show on the curve", onclick: () => onShow(step)}, whole(step)),
      attempt, time === null ? NONE : moment(time), text,
    ];
    fill("events", ["what", "step", "attempt", "when", "told"], story.marks.toReversed(), cells, ["step", "attempt"], ["told"]);
  }

  function attempts(story, now) {
    const last = story.attempts.at(-1);
    const cells = (one) => {
      const how = one.how ?? (one === last && now.is_alive ? now.state : "gone without a word");
      return [
        one.number, one.start_step === null ? NONE : `${whole(one.start_step)} → ${whole(one.last_step)}`,
        moment(one.began), one.ended === null || one.began === null ? NONE : duration(one.ended - one.began),
        one.why ? `${how}: ${one.why}` : how, one.world_size, one.secs_per_step ? `${number(60 / one.secs_per_step, 3)}/min` : NONE,
        one.saved, one.saved ? duration(one.blocked_secs / one.saved) : NONE, one.pid === null ? one.host : `${one.host} · ${one.pid}`,
      ];
    };
    const heads = ["attempt", "steps", "began", "took", "end", "ranks", "speed", "saved", "blocked", "host · pid"];
    fill("attempts", heads, story.attempts.toReversed(), cells, ["attempt", "ranks", "saved", "blocked"], ["end"]);
  }

  function generations(story, now) {
    const cells = ([step, time, reasons, ranks, size, verified, pinned, proven, fault]) => [
      whole(step), time === null ? NONE : element("span", {title: moment(time)}, ago(now.time - time)),
      fault === null ? reasons.join(", ") : element("span", {class: "bad"}, `${time === null ? "unreadable" : "damaged"}: ${fault}`),
      ranks, bytes(size),
      verified === null ? element("span", {class: "warn"}, "not yet") : element("span", {class: "good", title: moment(verified)}, "✓ read back"),
      proven ?? NONE, pinned === null ? NONE : pinned || "yes",
    ];
    const heads = ["step", "age", "reason", "ranks", "bytes", "verified", "proven by", "pinned"];
    fill("generations", heads, story.generations.toReversed(), cells, ["step", "ranks", "bytes"], ["reason", "proven by"]);
  }

  /** Return [name, facts] of each arm in a policy's state, however it is laid out; null if none. */
  function armsOf(state) {
    const arms = state && typeof state === "object" ? state.arms : null;
    if (!arms || typeof arms !== "object") return null;
    const found = Array.isArray(arms) ? arms.map((arm, place) => [String(arm?.name ?? place), arm]) : Object.entries(arms);
    return found.map(([name, facts]) => [name, facts && typeof facts === "object" ? facts : {weight: facts}]);
  }

  function policy(found) {
    at("policy-card").hidden = found === null;
    at("policy").replaceChildren();
    if (found === null) return;
    const {state, policy: settings} = found;
    const arms = armsOf(state) ?? [];
    if (arms.length) {
      const keys = [...new Set(arms.flatMap(([, facts]) => Object.keys(facts)))].filter((key) => key !== "name");
      keys.sort((one, other) => (other === "weight") - (one === "weight"));
      const top = Math.max(...arms.map(([, facts]) => (Number.isFinite(facts.weight) ? facts.weight : 0)), 1e-9);
      const show = (value) => (typeof value === "number" ? number(value, 5) : typeof value === "string" ? value : value === undefined || value === null ? NONE : JSON.stringify(value));
      const meter = (weight) => element("span", {class: "meter"}, element("meter", {min: 0, max: top, value: weight}), show(weight));
      const cells = ([name, facts]) => [name, ...keys.map((key) => (key === "weight" && Number.isFinite(facts.weight) ? meter(facts.weight) : show(facts[key])))];
      fill("policy", ["arm", ...keys], arms, cells, [], ["arm"]);
    }
    const isObject = state !== null && typeof state === "object" && !Array.isArray(state);
    const rest = arms.length && isObject ? Object.fromEntries(Object.entries(state).filter(([key]) => key !== "arms")) : state;
    for (const [name, value] of [["state", rest], ["settings", settings]])
      if (value !== null && value !== undefined && Object.keys(value).length)
        at("policy").append(element("p", {class: "quiet"}, name), element("pre", {}, JSON.stringify(value, null, 2)));
  }

  function samples(story) {
    const {total, rows} = story.samples;
    const pick = at("sample-pick");
    at("samples-card").hidden = rows.length === 0;
    if (!rows.length) return;
    const isLast = pick.options.length === 0 || pick.selectedIndex === pick.options.length - 1;
    const was = isLast ? rows.length - 1 : Math.min(pick.selectedIndex, rows.length - 1);
    pick.replaceChildren(...rows.map(([step], place) => element("option", {value: place}, `step ${whole(step)}`)));
    const show = (place) => {
      pick.selectedIndex = Math.max(0, Math.min(rows.length - 1, place));
      const [step, loss, text] = rows[pick.selectedIndex];
      const all = total === rows.length ? `${whole(total)} in all` : `the newest ${whole(rows.length)} of ${whole(total)}`;
      at("sample-head").textContent = `step ${whole(step)}${loss === null || loss === undefined ? "" : `, loss ${number(loss)}`} · ${all}`;
      at("sample-text").textContent = text;
    };
    pick.onchange = () => show(pick.selectedIndex);
    at("sample-back").onclick = () => show(pick.selectedIndex - 1);
    at("sample-on").onclick = () => show(pick.selectedIndex + 1);
    show(was);
  }

  return {events, attempts, generations, policy, samples};
})();
