"use strict";
// Puts the page together, and on a live one asks for news.

(async () => {
  const {at, element, whole, count, duration, ago, bytes, number, moment, soon} = words;
  const WORDS = {running: "running", suspended: "suspended", stopped: "stopped", ended: "ended", failed: "failed", dead: "dead", unknown: "unknown", new: "new"};
  const facts = JSON.parse(at("facts-data").textContent);
  const curve = JSON.parse(at("curve-data").textContent);
  let history = new decode.History();
  let now = facts.now, story = null, precision = curve;
  let arrived = Date.now(), failedSince = null;

  /** Seconds that went by since the facts held; a page that isn't live tells of its own time. */
  const since = () => (facts.live ? (Date.now() - arrived) / 1000 : 0);

  function head() {
    at("name").textContent = now.run;
    at("state").textContent = WORDS[now.state] ?? now.state;
    at("state").className = `state ${now.state}`;
    const ranks = now.world_size ? ` · ${count(now.world_size, "rank")}` : "";
    at("about").textContent = now.attempt ? `attempt ${now.attempt}${ranks}` : "";
    at("fresh").textContent = failedSince ? `no answer for ${duration((Date.now() - failedSince) / 1000)}`
      : facts.live ? "live" : `as of ${moment(now.time)}`;
    at("fresh").classList.toggle("bad", failedSince !== null);
    at("evidence").replaceChildren(...now.evidence.map((found) => {
      const text = found.what === "last step" ? lastStep() : found.text;
      const speaks = found.alive === true ? "good" : found.alive === false && now.state === "dead" ? "bad" : null;
      return element("li", {class: speaks}, element("b", {}, found.what), ` ${text}`);
    }));
    document.title = `${now.run}: ${now.state}, step ${now.last_step ?? "none"} · dist_ckpt`;
  }

  function lastStep() {
    const usual = now.secs_per_step ? `, usual is one every ${duration(now.secs_per_step)}` : "";
    const again = now.replays_until ? ", or one before it came out again as logged," : "";
    return `step ${whole(now.last_step)} was logged${again} ${ago(now.last_step_age_secs + since())}${usual}`;
  }

  function risk() {
    const dead = !now.is_alive;
    const steps = now.lost_steps;
    const cost = steps === null ? null : count(steps, "step") + (now.lost_secs === null || !steps ? "" : `, ${duration(now.lost_secs)}`);
    const home = at("risk");
    if (now.committed_step === null) {
      home.replaceChildren(element("b", {}, "No generation yet."), now.last_step === null ? " Nothing was trained." : ` All ${count(now.last_step, "step")} would be computed again.`);
      home.className = "risk warn";
      return;
    }
    const parts = steps === null ? [] : dead
      ? (steps ? ["A restart computes ", element("b", {}, cost), " again. "] : [element("b", {}, "Nothing is lost. ")])
      : ["If it died now you would lose ", element("b", {}, steps ? cost : "nothing"), steps ? " and the step in flight. " : " but the step in flight. "];
    const kept = now.verified_step === null ? `Step ${whole(now.committed_step)} is committed, no generation was read back yet.`
      : now.verified_step === now.committed_step ? `Step ${whole(now.verified_step)} is the newest generation, read back whole.`
      : `Step ${whole(now.verified_step)} is the last that was read back whole; step ${whole(now.committed_step)} is committed.`;
    home.replaceChildren(...parts, element("span", {class: "quiet"}, kept));
    home.className = now.troubles.length ? "risk bad" : now.verified_step === null ? "risk warn" : "risk";
  }

  function troubles() {
    at("troubles").hidden = now.troubles.length === 0;
    at("troubles").replaceChildren(...now.troubles.map((text) => element("li", {}, text)));
  }

  function tiles() {
    const {steps, losses, means} = history;
    const finite = losses.findLast((loss) => loss !== null);
    const mean = means.length ? means[means.length - 1] : null;
    const shown = [
      ["step", whole(now.last_step), now.until ? `of ${whole(now.until)}` : count(steps.length, "loss", "losses")],
      ["loss", finite === undefined ? words.NONE : number(mean, 5), finite === undefined ? "" : `smoothed; last ${number(finite, 5)}`],
      ["speed", now.secs_per_step ? `${number(60 / now.secs_per_step, 3)}/min` : words.NONE, now.secs_per_step ? `a step takes ${duration(now.secs_per_step)}` : "two checkpoints will tell"],
    ];
    if (now.left_secs !== null) shown.push(["time left", now.left_secs ? duration(now.left_secs) : "done", now.is_alive && now.left_secs ? `until about ${soon(now.time, now.left_secs)}` : "at the usual speed"]);
    shown.push(["committed", whole(now.committed_step), now.committed_age_secs === null ? "" : ago(now.committed_age_secs + since())]);
    if (now.free_bytes !== null) shown.push(["room for", now.generations_that_fit === null ? bytes(now.free_bytes) : whole(now.generations_that_fit), now.generations_that_fit === null ? "free on the disk" : `more generations of ${bytes(now.generation_bytes)}`]);
    at("tiles").replaceChildren(...shown.map(([name, value, note]) => element("div", {}, element("dt", {}, name), element("dd", {}, value), element("dd", {class: "quiet"}, note))));
  }

  const plot = new chart.Chart(at("chart"), history, readout);

  function readout(place, marks) {
    const {steps, losses, means} = history;
    if (place === null || place >= steps.length) return;
    const loss = losses[place] === null ? "not finite" : number(losses[place], precision.digits);
    const attempt = plot.bands.findLast(([, from, to]) => from < steps[place] && steps[place] <= to);
    const parts = [element("b", {}, `step ${whole(steps[place])}`), ` loss ${loss}`, ` · smoothed ${number(means[place], 5)}`];
    if (attempt) parts.push(` · attempt ${attempt[0]}`);
    for (const [kind, step, , , text] of marks.slice(0, 3)) parts.push(element("span", {class: `mark ${kind}`}, ` ${chart.GLYPHS[kind]} ${whole(step)} ${text}`));
    at("readout").replaceChildren(...parts);
  }

  function key() {
    const present = chart.KINDS.filter((kind) => story.marks.some((mark) => mark[0] === kind));
    const parts = present.map((kind) => element("span", {class: `mark ${kind}`}, `${chart.GLYPHS[kind]} ${kind} `));
    if (history.lost.length) parts.push(element("span", {class: "lost"}, "— voided by a later attempt "));
    if (history.notFinite) parts.push(`${count(history.notFinite, "loss is", "losses are")} not finite`);
    at("key").replaceChildren(...parts);
    at("replays").replaceChildren(...story.replays.flatMap((one) => [element("span", {class: one.all_agreed ? "good" : one.first_difference === null || !one.comparable ? "warn" : "bad"}, tellReplay(one)), element("br")]));
  }

  function tellReplay(one) {
    const what = `attempt ${one.attempt} from step ${whole(one.resumed_step)}: ${whole(one.num_logged)} replayed, ${whole(one.agreed)} bit-equal`;
    const first = one.first_difference === null ? "" : `, the first that differs is ${whole(one.first_difference)}`;
    return what + first + (one.comparable ? "" : " (bit-equality couldn't be asked for)") + (one.complete ? "" : "; ended inside the window");
  }

  const broken = new Map(); // a part's name → why it can't be shown

  /** Show parts of the page: one that fails costs itself, not the others. */
  function show(parts) {
    for (const [name, part] of Object.entries(parts)) {
      try {
        part();
        broken.delete(name);
      } catch (error) {
        broken.set(name, `Not shown: ${name} (${error.message}).`);
      }
    }
    const problems = [...story.problems, ...broken.values()];
    at("problems").hidden = problems.length === 0;
    at("problems").textContent = problems.join(" ");
  }

  /** The newest attempt goes on between two events of the journal. */
  function goOn() {
    const last = story.attempts.at(-1);
    if (last && last.how === null && now.last_step !== null) last.last_step = Math.max(last.last_step ?? 0, now.last_step);
  }

  function all() {
    goOn();
    show({
      head, risk, troubles, tiles, key,
      curve: () => {
        plot.tell(story);
        if (plot.place === null && history.steps.length) readout(history.steps.length - 1, []);
      },
      events: () => tables.events(story, (step) => { plot.goTo(step); at("chart").focus(); at("curve-head").scrollIntoView({behavior: "smooth"}); }),
      attempts: () => tables.attempts(story, now),
      generations: () => tables.generations(story, now),
      policy: () => tables.policy(story.policy),
      samples: () => tables.samples(story),
    });
    at("precision").hidden = precision.exact;
    at("precision").textContent = `Losses have ${precision.digits} digits here; all of them with \`dist-ckpt report --exact\`.`;
    at("foot").textContent = `${now.path} · dist_ckpt ${story.version}`;
  }

  async function take(given, voided) {
    history.add(...(await decode.entries(given)), voided);
    plot.history = history;
    at("log").disabled = !at("log").checked && !history.losses.some((loss) => loss > 0);
    plot.renew();
  }

  function toolbar() {
    at("zoom-in").onclick = () => plot.zoom(0.5);
    at("zoom-out").onclick = () => plot.zoom(2);
    at("whole").onclick = () => plot.showAll();
    at("smooth").onchange = () => { plot.isSmooth = at("smooth").checked; plot.build(); };
    at("log").onchange = () => { plot.isLog = at("log").checked; plot.build(); };
    at("goto").onchange = () => {
      const step = Number(at("goto").value.replace(/[^\d.]/g, ""));
      if (at("goto").value.trim() && Number.isFinite(step)) plot.goTo(step);
    };
  }

  async function ask() {
    const query = new URLSearchParams({since: history.count, file: facts.live.file, story: facts.live.story, void: facts.void});
    const answer = await fetch(`${facts.live.url}?${query}`, {cache: "no-store", signal: AbortSignal.timeout(20000)});
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const news = await answer.json();
    arrived = Date.now();
    now = news.now;
    facts.live.file = news.file;
    facts.live.story = news.token;
    facts.void = news.void;
    if (news.story) story = await decode.story(news.story);
    if (news.from === 0 && history.count) history = new decode.History();
    if (news.curve.count || news.from === 0) {
      precision = news.from === 0 ? news.curve : precision;
      await take(news.curve, news.void);
    }
    if (news.story || news.curve.count) all(); else show({head, risk, troubles, tiles});
  }

  async function follow() {
    for (;;) {
      await new Promise((done) => setTimeout(done, facts.live.every_secs * 1000));
      if (document.hidden) continue;
      try {
        await ask();
        failedSince = null;
      } catch (error) {
        failedSince = failedSince ?? Date.now();
      }
      show({head});
    }
  }

  try {
    story = await decode.story(at("story-data").textContent);
    at("page").hidden = false;
    await take(curve, facts.void);
    toolbar();
    all();
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  } catch (error) {
    at("failed").hidden = false;
    at("failed").textContent = `This page can't be shown: ${error.message}. It needs a browser of 2023 or newer.`;
    throw error;
  }
  if (facts.live) {
    setInterval(() => show({head, risk}), 1000);
    follow();
  }
})();
