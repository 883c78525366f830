// Attended tokens and attention weights by the same rules as Region and attention_weights in Python.
// This file does not touch the page, so that the tests can run it alone.
"use strict";
const pale = (() => {
  const halves = (() => {
    // Values of float16 by their bits; computed once.
    const table = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const sign = bits & 0x8000 ? -1 : 1, e = (bits >> 10) & 31, m = bits & 1023;
      table[bits] = e === 0 ? sign * m * 2 ** -24 : e === 31 ? (m ? NaN : sign * Infinity) : sign * (1 + m / 1024) * 2 ** (e - 15);
    }
    return table;
  })();

  function bytes(text) {
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  }

  function floats(text) {
    const raw = bytes(text), bits = new Uint16Array(raw.buffer), out = new Float32Array(bits.length);
    for (let i = 0; i < bits.length; i++) out[i] = halves[bits[i]];
    return out;
  }

  // Decode queries (already scaled) and keys of a block when they are first needed.
  function read(block) {
    if (!block.queries) { block.queries = floats(block.q); block.keys = floats(block.k); block.q = block.k = null; }
    return block;
  }

  function groups(block, h, w) {
    const [sr, sc] = block.pale;
    let nr = Math.ceil(h / sr), nc = Math.ceil(w / sc);
    if (block.grouping === "contiguous") return { row: i => Math.floor(i / sr), column: j => Math.floor(j / sc) };
    if (block.scope === "pale") nr = nc = Math.max(nr, nc);
    return { row: i => i % nr, column: j => j % nc };
  }

  const kinds = block => block.scope === "parallel" ? ["row", "column"] : [block.scope];
  const kindOf = (block, head) => { const k = kinds(block); return k[Math.floor(head * k.length / block.heads)]; };

  // Return the groups of the token (i, j) for heads of a kind: one, or two for a token of two pales.
  function members(block, stage, kind, i, j) {
    const { h, w } = stage, of = groups(block, h, w), row = of.row(i), column = of.column(j);
    const numbers = kind === "row" ? [row] : kind === "column" ? [column] : [...new Set([row, column])];
    block.lists ??= {};
    return numbers.map(p => block.lists[kind + p] ??= list(of, h, w, kind, p));
  }

  function list(of, h, w, kind, p) {
    const found = [];
    for (let a = 0; a < h; a++) for (let b = 0; b < w; b++)
      if ((kind !== "column" && of.row(a) === p) || (kind !== "row" && of.column(b) === p)) found.push(a * w + b);
    return found;
  }

  // Return 1 for each token that heads of a kind attend to.
  function region(block, stage, kind, i, j) {
    const out = new Uint8Array(stage.h * stage.w);
    for (const group of members(block, stage, kind, i, j)) for (const t of group) out[t] = 1;
    return out;
  }

  // Return the mean weights of some heads for the token (i, j), by token; their sum is one.
  function weights(block, stage, i, j, heads) {
    read(block);
    const { h, w } = stage, out = new Float64Array(h * w), c = block.heads * block.d, at = (i * w + j) * c;
    const cache = {};
    for (const head of heads) {
      const kind = kindOf(block, head), parts = cache[kind] ??= members(block, stage, kind, i, j);
      const from = head * block.d, share = 1 / (heads.length * parts.length);
      for (const group of parts) {
        const scores = new Float64Array(group.length);
        let top = -Infinity, sum = 0;
        for (let n = 0; n < group.length; n++) {
          const key = group[n] * c + from, query = at + from;
          let score = 0;
          for (let e = 0; e < block.d; e++) score += block.queries[query + e] * block.keys[key + e];
          scores[n] = score;
          if (score > top) top = score;
        }
        for (let n = 0; n < scores.length; n++) sum += scores[n] = Math.exp(scores[n] - top);
        for (let n = 0; n < scores.length; n++) out[group[n]] += share * scores[n] / sum;
      }
    }
    return out;
  }

  // Pass the shares of the tokens on by the mean attention of all heads; the weights are cached up to a maximum.
  const MAX_CACHED = 8e6;
  function propagate(block, stage, shares) {
    const { h, w } = stage, out = new Float64Array(h * w), every = [...Array(block.heads).keys()];
    block.rows ??= new Array(h * w);
    block.cached ??= 0;
    for (let t = 0; t < h * w; t++) {
      if (shares[t] < 1e-9) { out[t] += shares[t]; continue; }
      let row = block.rows[t];
      if (!row) {
        const all = weights(block, stage, Math.floor(t / w), t % w, every), index = [];
        for (let n = 0; n < all.length; n++) if (all[n]) index.push(n);
        row = { index: Uint16Array.from(index), weight: Float32Array.from(index, n => all[n]) };
        if ((block.cached += index.length) <= MAX_CACHED) block.rows[t] = row;
      }
      const { index, weight } = row, amount = shares[t];
      for (let n = 0; n < index.length; n++) out[index[n]] += amount * weight[n];
    }
    return out;
  }

  // Pass each share in equal parts to the 3x3 tokens that patch merging reads.
  function undoMerging(shares, from, to) {
    const out = new Float64Array(to.h * to.w);
    for (let i = 0; i < from.h; i++) for (let j = 0; j < from.w; j++) {
      const a0 = Math.max(0, 2 * i - 1), a1 = Math.min(to.h - 1, 2 * i + 1);
      const b0 = Math.max(0, 2 * j - 1), b1 = Math.min(to.w - 1, 2 * j + 1);
      const share = shares[i * from.w + j] / ((a1 - a0 + 1) * (b1 - b0 + 1));
      for (let a = a0; a <= a1; a++) for (let b = b0; b <= b1; b++) out[a * to.w + b] += share;
    }
    return out;
  }

  // Return where the content of a token comes from in the first stage; the sum is one.
  function rollout(stages, number, i, j) {
    let shares = new Float64Array(stages[number].h * stages[number].w);
    shares[i * stages[number].w + j] = 1;
    for (let s = number; s >= 0; s--) {
      for (let b = stages[s].blocks.length - 1; b >= 0; b--) {
        const next = propagate(stages[s].blocks[b], stages[s], shares);
        for (let t = 0; t < next.length; t++) next[t] = (next[t] + shares[t]) / 2;
        shares = next;
      }
      if (s) shares = undoMerging(shares, stages[s], stages[s - 1]);
    }
    return shares;
  }

  return { bytes, floats, kinds, kindOf, region, weights, rollout };
})();
if (typeof module !== "undefined") module.exports = pale;
