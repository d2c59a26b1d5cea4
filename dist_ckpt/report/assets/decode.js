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

  function meansOf(losses) {
    const means = new Array(losses.length);
    let sum = 0, weight = 0;
    for (let i = 0; i < losses.length; i++) {
      if (losses[i] !== null) {
        sum = KEEP * sum + (1 - KEEP) * losses[i];
        weight = KEEP * weight + (1 - KEEP);
      }
      means[i] = weight ? sum / weight : null;
    }
    return means;
  }

  /** The losses of a run: those that count, rising in step, and what was voided. */
  class History {
    constructor() {
      this.count = 0; // entries of the file that were seen
      this.steps = [];
      this.losses = []; // null where not finite
      this.means = []; // exponential, of the finite ones so far, the first not weighing more
      this.lost = []; // [steps, losses] of each tail that later entries voided
    }

    add(steps, losses, voided) {
      let last = this.steps.length ? this.steps[this.steps.length - 1] : -Infinity;
      for (let i = 0; i < steps.length; i++, this.count++) {
        const step = steps[i], loss = losses[i];
        if (this.count === voided) this.cut(0);
        else if (step <= last) this.cut(this.find(step));
        this.steps.push(step);
        this.losses.push(loss - loss === 0 ? loss : null);
        last = step;
      }
      if (this.count === voided) this.cut(0);
      this.means = meansOf(this.losses);
    }

    get notFinite() {
      return this.losses.reduce((sum, loss) => sum + (loss === null), 0);
    }

    /** Void the entries from a place on. */
    cut(place) {
      if (place >= this.steps.length) return;
      this.lost.push([this.steps.splice(place), this.losses.splice(place)]);
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
