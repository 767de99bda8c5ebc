// Draws what /live/events tells: numbers, slots, queue, blocks, throughput. Text goes in as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const GOLDEN = 0.618033988749895;
const FREE = -1;
const CACHED = -2;
const SECONDS = 60; // that the charts go back
const SHOW_FREE = 32; // engines with more slots show the taken ones alone

// fetch takes no address with a user and a password in it, as the page's own may have them.
const EVENTS = new URL("live/events", location.origin + location.pathname);

let engine = null; // what the stream said about it at first
let blocks = new Float64Array(0); // FREE, CACHED, or 2 * request + 1 where it is shared
let past = []; // {t, generated, prompt, slots} of each picture of the last SECONDS
let slotRows = new Map();
let painting = false;

// ---------------------------------------------------------------- colours

function hsl(request, lightness, saturation) {
  return `hsl(${((request * GOLDEN) % 1) * 360} ${saturation}% ${lightness}%)`;
}
const dark = (request) => hsl(request, 42, 65);
const light = (request) => hsl(request, 68, 55);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const nameOf = (request, sample) => (sample ? `${request}.${sample}` : `${request}`);
const count = (value) => Math.round(value).toLocaleString("en");

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function chip(request, sample) {
  const made = element("span", "chip", nameOf(request, sample));
  made.style.setProperty("--colour", light(request));
  return made;
}

// ---------------------------------------------------------------- numbers

const NUMBERS = [
  ["slots taken", (s) => `${s.running}/${engine.num_slots}`],
  ["in the queue", (s) => count(s.queued)],
  ["blocks in use", (s) => count(s.blocks_total - s.blocks_free - s.blocks_cached)],
  ["blocks cached", (s) => count(s.blocks_cached)],
  ["requests ended", (s) => count(s.stopped + s.length + s.cancelled + s.errors)],
  ["tokens generated", (s) => count(s.generated_tokens)],
  ["prompts cached", (s) => `${Math.round((100 * s.cached_tokens) / Math.max(s.prompt_tokens + s.cached_tokens, 1))} %`],
  ["preemptions", (s) => count(s.preemptions)],
];

function showNumbers(stats) {
  const box = $("numbers");
  if (!box.children.length) {
    for (const [words] of NUMBERS) {
      const cell = element("div");
      cell.append(element("b"), element("span", "", words));
      box.append(cell);
    }
  }
  NUMBERS.forEach(([, text], i) => { box.children[i].firstChild.textContent = text(stats); });
}

// ---------------------------------------------------------------- slots, queue, what happened

function makeRow(slot) {
  const row = element("div", "slot");
  row.dataset.slot = slot;
  row.parts = ["number", "request", "phase", "bar", "tokens"].map((name) => element("span", name));
  row.parts[0].textContent = slot;
  const bar = row.parts[3];
  bar.append(element("span"), element("span"));
  row.append(...row.parts);
  return row;
}

function fillRow(row, view) {
  const [, requestCell, phaseCell, bar, tokensCell] = row.parts;
  row.classList.toggle("free", !view);
  if (!view) {
    delete row.dataset.request;
    row.dataset.phase = "free";
    requestCell.replaceChildren();
    phaseCell.textContent = "free";
    tokensCell.textContent = "";
    for (const part of bar.children) part.style.width = "0";
    return;
  }
  const [, request, sample, decoding, prompt, tokens, computed, limit] = view;
  const name = nameOf(request, sample);
  if (row.dataset.request !== name) requestCell.replaceChildren(chip(request, sample));
  row.dataset.request = name;
  row.dataset.phase = phaseCell.textContent = decoding ? "decode" : "prefill";
  const widths = [Math.min(computed, prompt), tokens - prompt];
  [dark, light].forEach((shade, i) => {
    bar.children[i].style.background = shade(request);
    bar.children[i].style.width = `${(100 * widths[i]) / limit}%`;
  });
  tokensCell.textContent = decoding ? `${prompt} + ${tokens - prompt} of ${limit}` : `${computed} of ${tokens} read`;
}

function showSlots(views) {
  const taken = new Map(views.map((view) => [view[0], view]));
  const showFree = engine.num_slots <= SHOW_FREE;
  for (let slot = 0; slot < engine.num_slots; slot++) {
    const view = taken.get(slot);
    let row = slotRows.get(slot);
    if (!view && !showFree) {
      if (row) row.hidden = true;
      continue;
    }
    if (!row) {
      row = makeRow(slot);
      slotRows.set(slot, row);
      const after = [...$("slots").children].find((other) => Number(other.dataset.slot) > slot);
      $("slots").insertBefore(row, after || null);
    }
    row.hidden = false;
    fillRow(row, view);
  }
  $("slots-free").textContent = `${engine.num_slots - views.length} of ${engine.num_slots} free`;
}

function showQueue(queue, length) {
  $("queue").replaceChildren(...queue.map(([request, sample, prompt, preempted]) => {
    const made = chip(request, sample);
    made.dataset.request = nameOf(request, sample);
    made.append(element("small", "", `${prompt} tokens${preempted ? ", sent back" : ""}`));
    return made;
  }));
  if (length > queue.length) $("queue").append(element("span", "", `and ${length - queue.length} more`));
  $("queue-length").textContent = length ? `${length} waiting, the next one first` : "empty";
}

function showLog(entries) {
  const list = $("log");
  for (const [kind, step, slot, request, sample, more] of entries) {
    const line = element("li");
    line.dataset.kind = kind;
    line.dataset.request = nameOf(request, sample);
    const words = {
      in: `takes slot ${slot}${more ? `, ${more} tokens from the cache` : ""}`,
      out: slot < 0 ? `ends: ${more}` : `leaves slot ${slot}: ${more}`,
      back: `goes back from slot ${slot} to the queue: blocks are short`,
    }[kind];
    line.append(`step ${step}: `, chip(request, sample), ` ${words}`);
    list.prepend(line);
  }
  while (list.children.length > 200) list.lastChild.remove();
}

// ---------------------------------------------------------------- canvases

function sheet(canvas, height) {
  // Return a context in CSS pixels, cleared.
  const width = canvas.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  if (height) canvas.style.height = `${height}px`;
  const tall = height || canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  return [context, width, tall];
}

function rates(name) {
  // Tokens a second over the second before each picture: single steps would flicker.
  const out = [];
  let from = 0;
  for (let i = 1; i < past.length; i++) {
    while (past[i].t - past[from].t > 1 && from < i - 1) from++;
    out.push([past[i].t, (past[i][name] - past[from][name]) / Math.max(past[i].t - past[from].t, 1)]);
  }
  return out;
}

function paintChart(name, shade) {
  const [context, width, height] = sheet($(name));
  const points = rates(name);
  const now = points.length ? points[points.length - 1] : [0, 0];
  $(`${name}-now`).textContent = now[1] < 10 ? now[1].toFixed(1) : count(now[1]);
  const top = Math.max(1, ...points.map((point) => point[1]));
  const x = (t) => width * (1 - (now[0] - t) / SECONDS);
  const y = (value) => height - 1 - (height - 16) * (value / top);
  context.strokeStyle = colour("--line");
  context.beginPath();
  for (const at of [0, top]) { context.moveTo(0, y(at)); context.lineTo(width, y(at)); }
  context.stroke();
  if (points.length) {
    context.beginPath();
    context.moveTo(x(points[0][0]), y(0));
    for (const [t, value] of points) context.lineTo(x(t), y(value));
    context.lineTo(width, y(0));
    context.fillStyle = shade;
    context.fill();
  }
  context.fillStyle = colour("--dim");
  context.font = "11px system-ui, sans-serif";
  context.fillText(top < 10 ? top.toFixed(1) : count(top), 2, 11);
}

function paintHistory() {
  const line = Math.max(2, Math.min(14, Math.floor(320 / engine.num_slots)));
  const [context, width] = sheet($("history"), line * engine.num_slots + 1);
  context.fillStyle = colour("--empty");
  const gap = line > 4 ? 2 : 0;
  for (let slot = 0; slot < engine.num_slots; slot++) context.fillRect(0, slot * line, width, line - gap);
  const last = past.length ? past[past.length - 1].t : 0;
  const x = (t) => Math.round(width * (1 - (last - t) / SECONDS));
  for (let i = 1; i < past.length; i++) {
    const [left, right] = [x(past[i - 1].t), x(past[i].t)];
    for (const [slot, request, , decoding] of past[i].slots) {
      context.fillStyle = decoding ? light(request) : dark(request);
      context.fillRect(left, slot * line, right - left, line - gap);
    }
  }
}

function grid() {
  // Cells as large as fit, 12 px at most: [columns, pitch].
  const width = $("blocks").clientWidth;
  for (let pitch = 12; pitch > 3; pitch--) {
    const columns = Math.floor(width / pitch);
    if (Math.ceil(blocks.length / columns) * pitch <= 300) return [columns, pitch];
  }
  return [Math.max(1, Math.floor(width / 3)), 3];
}

function paintBlocks() {
  const [columns, pitch] = grid();
  const [context] = sheet($("blocks"), Math.ceil(blocks.length / columns) * pitch);
  const size = pitch - (pitch > 4 ? 2 : 1);
  const [free, cached, ink] = [colour("--empty"), colour("--cached"), colour("--ink")];
  let [owned, shared] = [0, 0];
  blocks.forEach((code, i) => {
    const [x, y] = [(i % columns) * pitch, Math.floor(i / columns) * pitch];
    context.fillStyle = code === FREE ? free : code === CACHED ? cached : light(Math.floor(code / 2));
    context.fillRect(x, y, size, size);
    if (code < 0) return;
    owned++;
    if (!(code % 2)) return;
    shared++;
    context.strokeStyle = ink;
    context.lineWidth = Math.min(2, size / 3);
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  });
  const held = `${count(owned)} of ${count(blocks.length)} owned, ${count(shared)} shared`;
  $("blocks-sum").textContent = `${held}, ${engine.block_size} tokens each`;
}

function sayBlock(event) {
  const [columns, pitch] = grid();
  const i = Math.floor(event.offsetY / pitch) * columns + Math.floor(event.offsetX / pitch);
  if (i >= blocks.length) return;
  const code = blocks[i];
  const owner = code === FREE ? "free" : code === CACHED ? "cached" : `request ${Math.floor(code / 2)}${code % 2 ? " and others" : ""}`;
  $("block-words").textContent = `· block ${i}: ${owner}`;
}

function paint() {
  painting = false;
  if (!engine) return;
  paintChart("generated", light(3));
  paintChart("prompt", dark(3));
  paintHistory();
  paintBlocks();
}

function paintSoon() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(paint);
}

// ---------------------------------------------------------------- the stream

function take(news) {
  if (news.engine) {
    engine = news.engine;
    $("title").textContent = engine.model;
    $("about").textContent = `${engine.architecture} in ${engine.dtype} on ${engine.device}`;
    document.title = `${engine.model}, live`;
    past = [];
    slotRows.clear();
    for (const id of ["slots", "log"]) $(id).replaceChildren();
    $("main").hidden = false;
  }
  if (news.blocks) {
    if (news.blocks.size !== undefined) blocks = new Float64Array(news.blocks.size).fill(FREE);
    news.blocks.at.forEach((block, i) => { blocks[block] = news.blocks.to[i]; });
  }
  if (news.slots) showSlots(news.slots);
  if (news.queue) showQueue(news.queue, news.stats.queued);
  showLog(news.log || []);
  showNumbers(news.stats);
  const slots = news.slots || (past.length ? past[past.length - 1].slots : []);
  const { generated_tokens: generated, prompt_tokens: prompt } = news.stats;
  past.push({ t: news.t, generated, prompt, slots });
  while (past[0].t < news.t - SECONDS - 2) past.shift();
  paintSoon();
}

function state(words, className) {
  $("state").textContent = words;
  $("state").className = className;
}

async function follow() {
  // EventSource does not say which status ended it, so the events are read by hand.
  const response = await fetch(EVENTS, { cache: "no-store", credentials: "same-origin" });
  if (response.status === 401) {
    state("the server wants its key: load the page again", "lost");
    return false;
  }
  if (!response.ok) throw new Error(`the server answers ${response.status}`);
  state("live", "live");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return true;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) take(JSON.parse(part.slice(6)));
  }
}

async function run() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      if (!(await follow())) return;
      wait = 500;
    } catch (error) {
      console.warn(error);
    }
    state("the connection is lost, trying again", "lost");
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

$("blocks").addEventListener("pointermove", sayBlock);
$("blocks").addEventListener("pointerdown", sayBlock);
window.addEventListener("resize", paintSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintSoon);
run();
