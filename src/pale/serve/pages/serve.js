// The page of `pale serve`. The attention of a point is computed here from queries and keys, by attention.js.
"use strict";
(() => {
const $ = id => document.getElementById(id), clamp = (v, a, b) => Math.min(b, Math.max(a, v));
const NAMES = { classification: "Classify", segmentation: "Segment", detection: "Detect" };
const MODES = {
  attention: ["Attention", "Attention weights of the token under the point, in the last block of each stage. Their sum is one."],
  pale: ["Pale", "The tokens that the token under the point attends to: interlaced rows for half of the heads, columns for the other half."],
};
const RAMP = [[27,12,65],[74,12,107],[120,28,109],[165,45,96],[207,68,70],[237,105,37],[251,155,6],[247,209,61],[252,255,164]];
const ramp = v => { const x = clamp(v, 0, 1) * (RAMP.length - 1), n = Math.min(RAMP.length - 2, Math.floor(x)), f = x - n; return RAMP[n].map((a, c) => a + f * (RAMP[n + 1][c] - a)); };
const COLORS = { row: [95, 165, 225], column: [244, 196, 70], both: [138, 205, 140], pale: [214, 110, 170] };
const SLIDER_FROM = .05;  // lowest score of an object that is asked for
const MAX_MASK = 1024;  // pixels of the longer side of drawn masks
let server = null, asking = null;
const state = { task: null, file: null, photo: null, results: {}, looks: {}, view: "result", mode: "attention", x: .5, y: .5, pinned: false, on: -1, opacity: .55, score: .5 };

function make(tag, text, cls) { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; }
const hide = (id, yes) => $(id).classList.toggle("hidden", yes);
const percent = v => `${(100 * v).toFixed(1)} %`;
const hue = n => `hsl(${(205 + 137.5 * n) % 360} 78% 58%)`;

function fail(words) { $("wrong").textContent = words; hide("error", !words); }

// The token of a server that needs one, stored while this tab is open.
const TOKEN = "pale-token";
const authorised = () => { const token = sessionStorage.getItem(TOKEN); return token ? { authorization: `Bearer ${token}` } : {}; };

async function answer(path, options) {
  let response;
  try { response = await fetch(path, { ...options, headers: authorised() }); }
  catch (e) { if (e.name === "AbortError") throw e; throw new Error("The server does not respond. Is it still running?"); }
  if (response.ok) return response.json();
  let words = `The server responded with status ${response.status}.`;
  try { words = (await response.json()).error; } catch { /* not JSON: only the status is known */ }
  const error = new Error(words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : "."));
  error.status = response.status;
  if (error.status === 401) askForToken();
  throw error;
}

// Return a photo as the browser shows it, rotated by EXIF; null if the browser cannot read the format.
async function readable(url) {
  const image = new Image();
  image.src = url;
  try { await image.decode(); return image; } catch { return null; }
}

async function show(file) {
  if (!file || !server) return;
  fail("");
  if (file.size > server.limits.max_upload_mb * 1e6) { fail(`The file has ${(file.size / 1e6).toFixed(1)} MB; the maximum is ${server.limits.max_upload_mb} MB.`); return; }
  const before = { file: state.file, photo: state.photo, results: state.results, looks: state.looks };
  const url = URL.createObjectURL(file), photo = await readable(url);
  Object.assign(state, { file, photo, results: {}, looks: {}, x: .5, y: .5, pinned: false, on: -1 });
  if (photo) reveal();
  const good = await ask();
  URL.revokeObjectURL(url);
  // After a file that is not an image, show the earlier photo again.
  if (good === false && state.file === file && !photo) { Object.assign(state, before); if (state.photo) { reveal(); result(); draw(); } else { hide("empty", false); hide("shown", true); side(false); } }
}

function reveal() { hide("empty", true); hide("shown", false); side(true); strip(); draw(); }
function side(yes) { hide("resultcard", !yes); hide("againcard", !yes); if (!yes) for (const id of ["opacitycard", "scorecard", "lookcard"]) hide(id, true); }

// Fetch the result, then queries and keys. Return true, false (with a message shown), or null if a newer request replaced this one.
async function ask() {
  const { task, file } = state;
  asking?.abort();
  const mine = asking = new AbortController(), signal = mine.signal, post = { method: "POST", body: file, signal };
  hide("busy", false);
  document.body.dataset.state = "busy";
  try {
    if (!state.results[task]) {
      const found = await answer(`/predict/${task}${{ segmentation: "?inline_mask=true", detection: `?score=${leastScore()}` }[task] || ""}`, post);
      await prepare(found);
      state.results[task] = found;
    }
    if (server.models[task].look && !state.looks[task]) {
      result();
      const look = await answer(`/look?task=${task}&photo=${!state.photo}`, post);
      state.looks[task] = look;
    }
    if (!state.photo && state.looks[task]?.photo) { state.photo = await readable(state.looks[task].photo); reveal(); }
    if (!state.photo) throw new Error("This browser cannot show this file format. The result is shown without the photo.");
    result();
    return true;
  } catch (e) {
    if (e.name === "AbortError" || asking !== mine) return null;
    fail(e.message);
    return false;
  } finally {
    if (asking === mine) { hide("busy", true); document.body.dataset.state = "ready"; }
  }
}

// Draw masks and shapes to small canvases.
async function prepare(found) {
  if (found.mask) {
    const image = await readable(`data:image/png;base64,${found.mask}`);
    found.mask = null;
    if (!image) return;
    const [canvas, g] = sheet(found.width, found.height);
    g.imageSmoothingEnabled = false;
    g.drawImage(image, 0, 0, canvas.width, canvas.height);
    found.colours = canvas;
  }
  for (const [n, o] of (found.objects || []).entries()) { o.colour = hue(n); if (o.segmentation) o.shape = shape(o.segmentation, o.colour); }
}
function sheet(w, h) {
  const f = Math.min(1, MAX_MASK / Math.max(w, h)), canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(w * f)); canvas.height = Math.max(1, Math.round(h * f));
  return [canvas, canvas.getContext("2d", { willReadFrequently: true })];
}

// Decode COCO run lengths: five bits per character, differences to the count before the last one, column by column.
function runs(text) {
  const out = [];
  for (let p = 0; p < text.length;) {
    let x = 0, k = 0, more = true;
    while (more) { const c = text.charCodeAt(p++) - 48; x |= (c & 31) << 5 * k; more = (c & 32) !== 0; k++; if (!more && (c & 16)) x |= -1 << 5 * k; }
    if (out.length > 2) x += out[out.length - 2];
    out.push(x);
  }
  return out;
}
function shape(code, colour) {
  const [h, w] = code.size, [canvas, g] = sheet(w, h), fx = canvas.width / w, fy = canvas.height / h;
  g.fillStyle = colour;
  let at = 0;
  runs(code.counts).forEach((n, i) => {
    if (i % 2) for (let a = at; a < at + n;) {
      const x = Math.floor(a / h), y = a % h, long = Math.min(h - y, at + n - a);
      const left = Math.floor(x * fx), top = Math.floor(y * fy);
      g.fillRect(left, top, Math.max(1, Math.floor((x + 1) * fx) - left), Math.max(1, Math.floor((y + long) * fy) - top));
      a += long;
    }
    at += n;
  });
  return canvas;
}

// The slider reaches below the server's threshold, which is where it starts.
const leastScore = () => Math.min(SLIDER_FROM, server.least_score);  // kept name
const kept = found => (found?.objects || []).filter(o => o.score >= state.score);

// Show the result in the side column.
function result() {
  const found = state.results[state.task], box = $("result"), task = state.task;
  box.replaceChildren();
  hide("opacitycard", !(found && task === "segmentation"));
  hide("scorecard", !(found && task === "detection" && found.objects.length));
  hide("lookcard", !state.looks[task]);
  if (!found) { box.append(make("p", "Running the model …", "faint")); strip(); draw(); return; }
  let summary = "";
  if (task === "classification") {
    box.append(bars(found.classes.map(c => [c.class, c.probability, null])));
    summary = `${found.classes[0].class}, ${percent(found.classes[0].probability)}`;
  } else if (task === "segmentation") {
    box.append(bars(found.classes.map(c => [c.class, c.share / 100, `rgb(${c.colour})`])));
    summary = found.classes.map(c => `${c.class} ${c.share.toFixed(1)} %`).join(", ");
  } else {
    const list = make("ul", undefined, "list"), some = kept(found);
    for (const o of some) {
      const li = make("li"), chip = make("i", undefined, "chip"), n = found.objects.indexOf(o);
      chip.style.background = o.colour;
      li.append(chip, o.class, make("span", o.score.toFixed(2)));
      li.onpointerenter = () => { state.on = n; draw(); };
      li.onpointerleave = () => { state.on = -1; draw(); };
      list.append(li);
    }
    box.append(some.length ? list : make("p", "No objects found.", "faint"));
    summary = some.length ? `${some.length} found` : "No objects found.";
  }
  const t = found.timing;
  box.append(make("p", `${found.width} x ${found.height} · ${t.total_ms.toFixed(0)} ms, of which ${t.model_ms.toFixed(0)} ms in the model`, "faint small"));
  $("said").textContent = summary;  // kept name
  strip(); modes(); draw();
}
function bars(rows) {
  const list = make("ul", undefined, "bars");
  for (const [name, share, colour] of rows) {
    const li = make("li"), head = make("div", undefined, "name"), track = make("div", undefined, "track"), fill = make("div", undefined, "fill");
    if (colour) { const chip = make("i", undefined, "chip"); chip.style.background = fill.style.background = colour; head.append(chip); }
    head.append(make("b", name), make("span", percent(share)));
    fill.style.width = `${100 * share}%`;
    track.append(fill); li.append(head, track); list.append(li);
  }
  return list;
}

// The views: the result and each stage.
let thumbs = [];
function strip() {
  const look = state.looks[state.task], wanted = look ? ["result", ...look.stages.keys()] : [];
  if (!look && state.view !== "result") state.view = "result";
  const key = `${state.task}/${wanted.length}/${look?.stages.map(s => `${s.h}x${s.w}`)}`;
  if ($("strip").dataset.key !== key) {
    $("strip").dataset.key = key;
    $("strip").replaceChildren();
    thumbs = wanted.map(view => {
      const b = make("button"), canvas = document.createElement("canvas");
      b.type = "button"; b.dataset.view = view;
      const label = make("span", view === "result" ? "Result" : `Stage ${view + 1}`);
      label.append(make("small", view === "result" ? "on the photo" : `${look.stages[view].h} x ${look.stages[view].w} tokens`));
      b.append(canvas, label);
      b.onclick = () => { state.view = view; strip(); modes(); draw(); };
      $("strip").append(b);
      return { view, canvas, button: b };
    });
  }
  for (const { view, button } of thumbs) button.setAttribute("aria-pressed", String(view === state.view));
}
function modes() {
  choices($("modes"), Object.entries(MODES).map(([k, v]) => [k, v[0]]), state.mode, v => { state.mode = v; if (state.view === "result") state.view = Math.min(2, thumbs.length - 2); strip(); modes(); draw(); });
  $("modehelp").textContent = MODES[state.mode][1];
}
function choices(box, list, chosen, choose) {
  const had = box.contains(document.activeElement) ? document.activeElement.dataset.value : null;
  box.replaceChildren(...list.map(([value, text]) => {
    const b = make("button", text);
    b.type = "button"; b.dataset.value = value; b.setAttribute("aria-pressed", String(value === chosen));
    b.onclick = () => choose(value);
    return b;
  }));
  if (had) box.querySelector(`[data-value="${had}"]`)?.focus();
}

const spot = stage => { const look = state.looks[state.task]; return [clamp(Math.floor(state.y * look.seen_height / stage.stride), 0, stage.h - 1), clamp(Math.floor(state.x * look.seen_width / stage.stride), 0, stage.w - 1)]; };
function layer(s) {
  const stage = state.looks[state.task].stages[s], block = stage.blocks[0], [i, j] = spot(stage), parts = {};
  for (const kind of pale.kinds(block)) parts[kind] = pale.region(block, stage, kind, i, j);
  const mask = new Uint8Array(stage.h * stage.w);
  for (const kind in parts) parts[kind].forEach((v, t) => { mask[t] |= v; });
  const values = state.mode === "pale" ? null : pale.weights(block, stage, i, j, [...Array(block.heads).keys()]);
  return { stage, parts, mask, values, at: [i, j] };
}

const small = document.createElement("canvas");
function paint(canvas, view, width) {
  const ratio = window.devicePixelRatio || 1, W = state.photo.naturalWidth, H = state.photo.naturalHeight;
  const wide = Math.max(1, Math.round(width * ratio)), high = Math.max(1, Math.round(wide * H / W)), g = canvas.getContext("2d");
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  g.imageSmoothingEnabled = true;
  g.drawImage(state.photo, 0, 0, wide, high);
  let made = null;
  if (view === "result") findings(g, wide, high, canvas === $("main") ? ratio : 0);
  else { made = layer(view); tokens(g, wide, high, made); }
  if (state.looks[state.task] && (view !== "result" || canvas === $("main"))) {
    const r = Math.max(3.5 * ratio, wide / 110);
    g.lineWidth = Math.max(1.5, r / 2.6); g.strokeStyle = "#fff"; g.fillStyle = "#d7191c";
    g.beginPath(); g.arc(wide * state.x, high * state.y, r, 0, 7); g.fill(); g.stroke();
  }
  return made;
}
function tokens(g, wide, high, { stage, parts, mask, values }) {
  const look = state.looks[state.task], n = stage.h * stage.w, sg = small.getContext("2d");
  small.width = stage.w; small.height = stage.h;
  const image = sg.createImageData(stage.w, stage.h), px = image.data, top = values ? values.reduce((a, v) => Math.max(a, v), 0) : 0;
  for (let t = 0; t < n; t++) {
    let color = [9, 12, 20], alpha = .74;
    if (!values && mask[t]) { const kinds = Object.keys(parts).filter(k => parts[k][t]); color = COLORS[kinds.length > 1 ? "both" : kinds[0]]; alpha = .56; }
    else if (mask[t]) { const v = top ? Math.sqrt(values[t] / top) : 0; color = ramp(v); alpha = .45 + .4 * v; }
    px.set([...color, 255 * alpha], 4 * t);
  }
  sg.putImageData(image, 0, 0);
  g.imageSmoothingEnabled = false;
  g.drawImage(small, 0, 0, wide * stage.w * stage.stride / look.seen_width, high * stage.h * stage.stride / look.seen_height);
}
// Draw colours, shapes and boxes, and class names on the main canvas.
function findings(g, wide, high, ratio) {
  const found = state.results[state.task];
  if (!found) return;
  if (found.colours) { g.globalAlpha = state.opacity; g.imageSmoothingEnabled = false; g.drawImage(found.colours, 0, 0, wide, high); g.globalAlpha = 1; }
  const fx = wide / found.width, fy = high / found.height, shown = kept(found);
  for (const o of shown) {
    const faded = state.on >= 0 && found.objects[state.on] !== o;
    if (o.shape) { g.globalAlpha = faded ? .12 : .45; g.imageSmoothingEnabled = true; g.drawImage(o.shape, 0, 0, wide, high); }
    g.globalAlpha = faded ? .25 : 1;
    const [x, y, w, h] = o.bbox;
    g.lineWidth = Math.max(1, 2 * (ratio || .6)); g.strokeStyle = o.colour;
    g.strokeRect(x * fx, y * fy, w * fx, h * fy);
    g.globalAlpha = 1;
  }
  if (ratio) for (const o of [...shown].reverse()) if (state.on < 0 || found.objects[state.on] === o) {
    const [x, y] = o.bbox, text = `${o.class} ${o.score.toFixed(2)}`;
    g.font = `${12 * ratio}px system-ui, sans-serif`;
    const long = g.measureText(text).width + 8 * ratio, tall = 18 * ratio;
    const left = clamp(x * fx - g.lineWidth / 2, 0, Math.max(0, wide - long)), top = y * fy >= tall ? y * fy - tall : clamp(y * fy, 0, high - tall);
    g.fillStyle = o.colour; g.fillRect(left, top, long, tall);
    g.fillStyle = "#10141b"; g.textBaseline = "middle"; g.fillText(text, left + 4 * ratio, top + tall / 2);
  }
}

let queued = false;
function draw() { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; drawNow(); }); } }
function drawNow() {
  if (!state.photo) return;
  const W = state.photo.naturalWidth, H = state.photo.naturalHeight;
  const width = Math.max(1, Math.min($("photo").clientWidth, .74 * innerHeight * W / H)), main = $("main");
  main.style.width = `${width}px`;
  const made = paint(main, state.view, width);
  for (const { view, canvas } of thumbs) paint(canvas, view, canvas.clientWidth || 120);
  legend();
  facts(made);
}
function legend() {
  const box = $("legend"), look = state.looks[state.task];
  box.replaceChildren();
  if (state.view !== "result" && look) {
    if (state.mode === "attention") { const key = make("span", "0 ", "key"); key.append(make("i", undefined, "ramp"), " maximum"); box.append(key); }
    else {
      const kinds = pale.kinds(look.stages[state.view].blocks[0]);
      for (const [c, text] of kinds.length > 1 ? [["row", "rows"], ["column", "columns"], ["both", "both"]] : [[kinds[0], kinds[0] === "pale" ? "pales" : kinds[0] + "s"]]) {
        const key = make("span", undefined, "key"), chip = make("i");
        chip.style.background = `rgb(${COLORS[c]})`; key.append(chip, text); box.append(key);
      }
    }
  }
  $("hint").textContent = !look ? "" : state.pinned ? "Pinned. Click to release; arrow keys move the point by one token." : "Move over the photo or tap it to see the attention of that point; click to pin it.";
}
function facts(made) {
  const list = [], found = state.results[state.task], W = found?.width, H = found?.height;
  if (W) list.push(["point", `${Math.floor(state.x * W)}, ${Math.floor(state.y * H)}`]);
  if (found?.colours) {
    const c = found.colours, px = c.getContext("2d").getImageData(clamp(Math.floor(state.x * c.width), 0, c.width - 1), clamp(Math.floor(state.y * c.height), 0, c.height - 1), 1, 1).data;
    const here = found.classes.find(k => k.colour.every((v, i) => v === px[i]));
    if (here) list.push(["class here", here.class]);
  }
  if (made) {
    const { stage, mask, values, at } = made, n = mask.reduce((a, v) => a + v, 0);
    list.push(["token", `row ${at[0]}, column ${at[1]}`], ["pale", `${n.toLocaleString("en")} of ${mask.length.toLocaleString("en")} tokens`]);
    if (values) {
      let sum = 0, top = 0, where = 0;
      values.forEach((v, t) => { sum += v; if (v > top) { top = v; where = t; } });
      list.push(["weights sum to", sum.toFixed(4)], ["maximum", `${(100 * top).toPrecision(3)} % at ${Math.floor(where / stage.w)}, ${where % stage.w}`]);
    }
  }
  $("facts").replaceChildren(...list.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

function tasks() {
  const known = Object.keys(server.models);
  choices($("tasks"), known.map(t => [t, NAMES[t] || t]), state.task, t => { if (t === state.task) return; state.task = t; state.on = -1; fail(""); tasks(); if (state.photo) { result(); ask(); } });
  const about = server.models[state.task];
  $("model").textContent = `${about.model} · ${about.classes} class${about.classes === 1 ? "" : "es"} · ${server.device === "cpu" ? "CPU" : "GPU"}`;
  hide("untrained", about.trained);
}

function move(e) {
  const r = $("main").getBoundingClientRect();
  state.x = clamp((e.clientX - r.left) / r.width, 0, .9999);
  state.y = clamp((e.clientY - r.top) / r.height, 0, .9999);
  draw();
}
const box = $("photo");
box.addEventListener("pointermove", e => { if (!state.pinned || (e.pointerType === "touch" && e.isPrimary)) move(e); });
box.addEventListener("pointerdown", e => { move(e); state.pinned = e.pointerType === "touch" || !state.pinned; });
box.addEventListener("keydown", e => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key], look = state.looks[state.task];
  if (!step || !look) return;
  e.preventDefault();
  const stride = look.stages[state.view === "result" ? 0 : state.view].stride;
  state.x = clamp(state.x + step[0] * stride / look.seen_width, 0, .9999);
  state.y = clamp(state.y + step[1] * stride / look.seen_height, 0, .9999);
  state.pinned = true; draw();
});

const pick = () => $("file").click();
$("choose").onclick = $("again").onclick = pick;
$("file").onchange = e => { show(e.target.files[0]); e.target.value = ""; };
$("example").onclick = $("exampleagain").onclick = async () => {
  fail("");
  try { const r = await fetch("/example"); if (!r.ok) throw new Error(); show(await r.blob()); }
  catch { fail("The example could not be loaded. Is the server still running?"); }
};
$("dismiss").onclick = () => fail("");
$("opacity").oninput = e => { state.opacity = e.target.value / 100; $("opacityshown").textContent = `${e.target.value} %`; draw(); };
$("score").oninput = e => { state.score = Number(e.target.value); $("scoreshown").textContent = state.score.toFixed(2); result(); };
let inside = 0;
const files = e => [...e.dataTransfer?.types || []].includes("Files");
addEventListener("dragenter", e => { if (files(e)) { inside++; hide("over", false); } });
addEventListener("dragleave", e => { if (files(e) && --inside <= 0) { inside = 0; hide("over", true); } });
addEventListener("dragover", e => { if (files(e)) e.preventDefault(); });
addEventListener("drop", e => { if (!files(e)) return; e.preventDefault(); inside = 0; hide("over", true); show(e.dataTransfer.files[0]); });
addEventListener("paste", e => { const file = [...e.clipboardData?.files || []][0]; if (file) { e.preventDefault(); show(file); } });
addEventListener("resize", draw);

async function begin() {
  let about;
  try { about = await answer("/health"); } catch (e) { fail(e.message); return; }
  if (about.token === "required") { askForToken(); return; }
  server = about;
  state.task = Object.keys(server.models)[0];
  state.score = server.least_score;  // kept name
  Object.assign($("score"), { min: leastScore(), value: state.score }); $("scoreshown").textContent = state.score.toFixed(2);
  $("opacity").value = 100 * state.opacity; $("opacityshown").textContent = `${$("opacity").value} %`;
  tasks();
  document.body.dataset.state = "ready";
}
function askForToken() { sessionStorage.removeItem(TOKEN); $("token").value = ""; hide("tokencard", false); $("token").focus(); }
function enter() {
  const token = $("token").value.trim();
  if (!/^[!-~]+$/.test(token)) { fail("A token must be printable ASCII without spaces."); return; }
  sessionStorage.setItem(TOKEN, token);
  hide("tokencard", true); fail(""); begin();
}
$("enter").onclick = enter;
$("token").onkeydown = e => { if (e.key === "Enter") enter(); };
begin();
})();
