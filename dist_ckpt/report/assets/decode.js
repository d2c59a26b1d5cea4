"use strict";
// What a page carries, read back: see _curve.py. Losses follow the rule of the loss file here.

const decode = (() => {
  const KEEP = 0.98; // of the exponential mean: the weight of what was before

  async function inflate(base64) {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  async function story(base64) {
    return JSON.parse(new TextDecoder().decode(await inflate(base64)));
  }

  /** Return [steps, losses], in the order of the file. */
  async function entries(curve) {
    const {count, planes} = curve;
    const data = await inflate(curve.data);
    const steps = new Float64Array(data.buffer.slice(0, 8 * count));
    for (let i = 1; i < count; i++) steps[i] += steps[i - 1];
    const bytes = new Uint8Array(8 * count);
    for (let plane = 0; plane < planes; plane++) {
      const start = (8 + plane) * count;
      for (let i = 0; i < count; i++) bytes[8 * i + 7 - plane] = data[start + i];
    }
    return [steps, new Float64Array(bytes.buffer)];
  }

  /** The losses of a run: those that count, rising in step, and what was voided. */
  class History {
    constructor() {
      this.count = 0; // entries of the file that were seen
      this.steps = [];
      this.losses = []; // null where not finite
      this.means = []; // exponential, of the finite ones so far, the first not weighing more
      this.sums = []; // what the means are made of…
      this.weights = []; // …and divided by
      this.lost = []; // [steps, losses] of each tail that later entries voided
      this.notFinite = 0;
    }

    add(steps, losses, voided) {
      for (let i = 0; i < steps.length; i++) {
        if (this.count === voided) this.cut(0);
        const step = steps[i];
        if (this.steps.length && this.steps[this.steps.length - 1] >= step) this.cut(this.find(step));
        const loss = Number.isFinite(losses[i]) ? losses[i] : null;
        let sum = this.sums.at(-1) ?? 0, weight = this.weights.at(-1) ?? 0;
        this.steps.push(step);
        this.losses.push(loss);
        if (loss !== null) {
          sum = KEEP * sum + (1 - KEEP) * loss;
          weight = KEEP * weight + 1 - KEEP;
        }
        this.sums.push(sum);
        this.weights.push(weight);
        this.means.push(weight ? sum / weight : null);
        this.count++;
      }
      if (this.count === voided) this.cut(0);
      this.notFinite = this.losses.reduce((sum, loss) => sum + (loss === null), 0);
    }

    /** Void the entries from a place on. */
    cut(place) {
      if (place >= this.steps.length) return;
      const steps = this.steps.splice(place);
      this.lost.push([steps, this.losses.splice(place)]);
      this.means.length = place;
      this.sums.length = this.weights.length = place;
    }

    /** Return the place of the first entry whose step isn't below. */
    find(step) {
      let low = 0, high = this.steps.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.steps[middle] < step) low = middle + 1; else high = middle;
      }
      return low;
    }

    /** Return the place of the entry that is nearest to a step. */
    nearest(step) {
      const place = this.find(step);
      if (place === 0) return 0;
      if (place === this.steps.length) return place - 1;
      return step - this.steps[place - 1] <= this.steps[place] - step ? place - 1 : place;
    }
  }

  return {story, entries, History};
})();
