"use strict";
// The curve: uPlot, with a band for each attempt, marks, replayed windows, keys, wheel and fingers.

const chart = (() => {
  const KINDS = ["signal", "pivot", "fork", "rewind", "crash", "fault"];
  const GLYPHS = {signal: "●", pivot: "◆", fork: "■", rewind: "◀", crash: "✕", fault: "▲"};
  const NEAR_PX = 8;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** Return [number, from, to] of each attempt: what is left of it after later ones went back. */
  function bandsOf(attempts) {
    return attempts
      .map((attempt, place) => {
        const later = attempts.slice(place + 1).map((one) => one.start_step).filter((step) => step !== null);
        return [attempt.number, attempt.start_step, Math.min(attempt.last_step ?? 0, ...later)];
      })
      .filter(([, from, to]) => from !== null && to > from);
  }

  class Chart {
    constructor(home, history, onMove) {
      this.home = home;
      this.history = history;
      this.onMove = onMove;
      this.isWhole = true;
      this.isLog = false;
      this.isSmooth = true;
      this.place = null; // of the point that is read out
      this.tell({attempts: [], marks: [], replays: []});
      new ResizeObserver(() => this.fit()).observe(home);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
      home.addEventListener("keydown", (event) => this.key(event));
    }

    tell(story) {
      this.bands = bandsOf(story.attempts);
      this.marks = story.marks;
      this.replays = story.replays;
      if (this.plot) this.plot.redraw(false);
    }

    get data() {
      const {steps, losses, means} = this.history;
      const drawn = this.isLog ? losses.map((loss) => (loss > 0 ? loss : null)) : losses;
      return [steps, drawn, this.isSmooth ? means : means.map(() => null)];
    }

    get size() {
      return {width: Math.max(200, this.home.clientWidth), height: this.home.clientWidth < 600 ? 280 : 380};
    }

    build() {
      const range = this.plot && !this.isWhole ? {...this.plot.scales.x} : null;
      if (this.plot) this.plot.destroy();
      const axis = {stroke: color("--quiet"), grid: {stroke: color("--line"), width: 1}, ticks: {stroke: color("--line"), width: 1}};
      const raw = this.isSmooth ? color("--raw") : color("--curve");
      this.plot = new uPlot({
        ...this.size,
        legend: {show: false},
        scales: {
          x: {time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high])},
          y: {distr: this.isLog ? 3 : 1},
        },
        axes: [
          {...axis, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? words.whole(tick) : ""))},
          {...axis, size: 56},
        ],
        series: [
          {},
          {stroke: raw, width: 1, points: {show: (plot) => this.isSparse(plot), size: 5, fill: raw}},
          {stroke: color("--curve"), width: 2, points: {show: false}},
        ],
        cursor: {y: false, drag: {x: true, y: false}, points: {size: 7, fill: color("--curve")}},
        select: {show: true},
        hooks: {
          drawClear: [(plot) => this.drawBands(plot)],
          draw: [(plot) => this.drawMarks(plot)],
          setCursor: [(plot) => this.moved(plot)],
          setScale: [(plot, key) => key === "x" && this.scaled(plot)],
        },
      }, this.data, this.home);
      this.plot.over.addEventListener("wheel", (event) => this.wheel(event), {passive: false});
      this.plot.over.addEventListener("dblclick", () => this.showAll());
      fingers(this, this.plot.over);
      if (range) this.show(range.min, range.max);
    }

    /** The history has more entries, or others. */
    renew() {
      if (!this.plot) return this.build();
      const {min, max} = this.plot.scales.x;
      const isWhole = this.isWhole;
      this.still(() => this.plot.setData(this.data, isWhole));
      if (!isWhole) this.show(min, max);
    }

    fit() {
      const {width, height} = this.size;
      if (this.plot && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({width, height});
    }

    isSparse(plot) {
      const [from, to] = plot.series[0].idxs ?? [0, 0];
      return to - from < plot.bbox.width / devicePixelRatio / 8;
    }

    // What is shown

    get ends() {
      const {steps} = this.history;
      return steps.length ? [steps[0], steps[steps.length - 1]] : [0, 1];
    }

    show(min, max) {
      const [first, last] = this.ends;
      const width = Math.max(max - min, 2);
      const low = Math.max(first, Math.min(min, last - width));
      const high = Math.min(last, low + width);
      const ends = high > low ? {min: low, max: high} : {min: first - 1, max: last + 1};
      this.still(() => this.plot.setScale("x", ends));
    }

    /** Change the plot at once; what is read out stays, though another point is under the cursor. */
    still(change) {
      this.isStill = true;
      this.plot.batch(change);
      this.isStill = false;
    }

    showAll() {
      const [first, last] = this.ends;
      this.show(first, last);
    }

    scaled(plot) {
      const {min, max} = plot.scales.x;
      const [first, last] = this.ends;
      this.isWhole = min <= first && max >= last;
      this.home.dataset.min = min;
      this.home.dataset.max = max;
    }

    /** Zoom by a factor below or above one around a step, or the middle. */
    zoom(factor, around) {
      const {min, max} = this.plot.scales.x;
      const middle = around ?? (min + max) / 2;
      this.show(middle - (middle - min) * factor, middle + (max - middle) * factor);
    }

    pan(share) {
      const {min, max} = this.plot.scales.x;
      const [first, last] = this.ends;
      const by = Math.max(first - min, Math.min(last - max, (max - min) * share));
      this.show(min + by, max + by);
    }

    /** Read a point out, and bring it into view. */
    read(place) {
      const {steps, losses} = this.history;
      if (!steps.length) return;
      this.place = Math.max(0, Math.min(steps.length - 1, place));
      const step = steps[this.place];
      const {min, max} = this.plot.scales.x;
      if (step < min || step > max) this.show(step - (max - min) / 2, step + (max - min) / 2);
      const left = this.plot.valToPos(step, "x");
      const top = losses[this.place] === null ? 0 : this.plot.valToPos(losses[this.place], "y");
      this.still(() => this.plot.setCursor({left, top}, false));
      this.onMove(this.place, this.near(left));
    }

    /** Read the point of a step out, from near enough that its neighbours can be told apart. */
    goTo(step) {
      const place = this.history.nearest(step);
      const {min, max} = this.plot.scales.x;
      const pixels = this.plot.over.clientWidth;
      if (max - min > pixels / 2) this.show(step - pixels / 16, step + pixels / 16);
      this.read(place);
    }

    moved(plot) {
      if (this.isStill) return;
      const {idx, left} = plot.cursor;
      if (left < 0 || idx === null || idx === undefined) return;
      this.place = idx;
      this.onMove(idx, this.near(left));
    }

    near(left) {
      return this.marks.filter(([, step]) => Math.abs(this.plot.valToPos(step, "x") - left) < NEAR_PX);
    }

    // What is drawn

    drawBands(plot) {
      const {ctx, bbox} = plot;
      const x = (step) => Math.max(bbox.left, Math.min(bbox.left + bbox.width, plot.valToPos(step, "x", true)));
      ctx.save();
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "left";
      ctx.textBaseline = "top";
      this.bands.forEach(([number, from, to], place) => {
        const [left, right] = [x(from), x(to)];
        if (right <= left) return;
        ctx.fillStyle = color(place % 2 ? "--band-b" : "--band-a");
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
        const name = right - left > 90 * devicePixelRatio ? `attempt ${number}` : String(number);
        if (this.bands.length > 1 && ctx.measureText(name).width + 12 < right - left) {
          ctx.fillStyle = color("--quiet");
          ctx.fillText(name, left + 6, bbox.top + 32 * devicePixelRatio);
        }
      });
      ctx.textBaseline = "bottom";
      for (const window of this.replays) {
        const [left, right] = [x(window.resumed_step), x(window.resumed_step + window.num_logged)];
        if (right <= left) continue;
        ctx.fillStyle = color("--replay");
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
        const text = `${window.num_logged} replayed, ${window.agreed} bit-equal`;
        if (ctx.measureText(text).width + 12 < right - left) {
          ctx.fillStyle = color("--quiet");
          ctx.fillText(text, left + 6, bbox.top + bbox.height - 6);
        }
      }
      ctx.restore();
    }

    drawMarks(plot) {
      const {ctx, bbox} = plot;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
      ctx.clip();
      this.drawLost(plot, ctx);
      ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.textBaseline = "top";
      const {min, max} = plot.scales.x;
      const seen = new Set(), taken = new Map(); // glyphs of one place stand below each other
      for (const [kind, step] of this.marks) {
        if (step < min || step > max) continue;
        const x = Math.round(plot.valToPos(step, "x", true));
        if (seen.has(`${kind} ${x}`)) continue;
        seen.add(`${kind} ${x}`);
        const place = Math.round(x / (10 * devicePixelRatio));
        const row = taken.get(place) ?? 0;
        taken.set(place, row + 1);
        ctx.strokeStyle = ctx.fillStyle = color(`--${kind}`);
        ctx.lineWidth = devicePixelRatio;
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(x + 0.5, bbox.top + 16 * devicePixelRatio);
        ctx.lineTo(x + 0.5, bbox.top + bbox.height);
        ctx.stroke();
        ctx.fillText(GLYPHS[kind] ?? "●", x, bbox.top + (2 + 14 * Math.min(row, 12)) * devicePixelRatio);
      }
      ctx.restore();
    }

    /** What was computed and then voided, by a rewind or a replay that came out otherwise. */
    drawLost(plot, ctx) {
      const {min, max} = plot.scales.x;
      ctx.strokeStyle = color("--lost");
      ctx.lineWidth = devicePixelRatio;
      for (const [steps, losses] of this.history.lost) {
        if (steps[0] > max || steps[steps.length - 1] < min) continue;
        ctx.beginPath();
        let isDown = false;
        for (let i = 0; i < steps.length; i++) {
          if (losses[i] === null || (this.isLog && losses[i] <= 0)) { isDown = false; continue; }
          const x = plot.valToPos(steps[i], "x", true), y = plot.valToPos(losses[i], "y", true);
          if (isDown) ctx.lineTo(x, y); else ctx.moveTo(x, y);
          isDown = true;
        }
        ctx.stroke();
      }
    }

    // Hands

    wheel(event) {
      if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && document.activeElement !== this.home && !event.altKey) return; // the page scrolls
      event.preventDefault();
      const box = this.plot.over.getBoundingClientRect();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / box.width);
      else this.zoom(Math.exp(event.deltaY / 300), this.plot.posToVal(event.clientX - box.left, "x"));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.plot) return;
      const here = this.place ?? this.history.nearest((this.plot.scales.x.min + this.plot.scales.x.max) / 2);
      const around = this.place === null ? undefined : this.history.steps[this.place];
      const doing = {
        "+": () => this.zoom(0.5, around), "=": () => this.zoom(0.5, around), "-": () => this.zoom(2, around),
        "0": () => this.showAll(), Escape: () => this.showAll(),
        ArrowLeft: () => (event.shiftKey ? this.pan(-0.2) : this.read(here - 1)),
        ArrowRight: () => (event.shiftKey ? this.pan(0.2) : this.read(here + 1)),
        Home: () => this.read(0), End: () => this.read(this.history.steps.length - 1),
      }[event.key];
      if (!doing) return;
      event.preventDefault();
      doing();
    }
  }

  /** One finger pans sideways, two zoom; up and down the page scrolls. */
  function fingers(chart, over) {
    const down = new Map();
    over.style.touchAction = "pan-y";
    const place = (event) => event.clientX - over.getBoundingClientRect().left;
    over.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse") down.set(event.pointerId, place(event));
    });
    over.addEventListener("pointermove", (event) => {
      if (!down.has(event.pointerId)) return;
      const [was, now] = [down.get(event.pointerId), place(event)];
      const other = [...down].find(([id]) => id !== event.pointerId);
      if (other) {
        const spread = Math.abs(now - other[1]) || 1;
        chart.zoom(Math.abs(was - other[1]) / spread || 1, chart.plot.posToVal((now + other[1]) / 2, "x"));
      } else chart.pan((was - now) / over.clientWidth);
      down.set(event.pointerId, now);
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"])
      over.addEventListener(name, (event) => down.delete(event.pointerId));
  }

  return {Chart, KINDS, GLYPHS, bandsOf};
})();
