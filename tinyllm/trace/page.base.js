/* Words, elements, packed numbers, what is selected, and colours: what all other parts use. */
const D = JSON.parse(document.getElementById('data').textContent);

/* All words come from the page's data, in its language; `word` fills their {places} in. */
const word = (key, values = {}) => D.texts[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
const STATISTICS = ['entropy', 'sink', 'distance', 'previous', 'induction'];
const statistic = k => word('stat_' + k);
const KEYS = [
  ['← →', 'token'],
  ['↑ ↓', 'layer'],
  ['[ ]', 'head'],
  ['n p', 'step'],
  ['Enter', 'open'],
  ['Esc', 'close'],
  ['s', 'sinks'],
  ['v', 'value'],
  ['d', 'theme'],
  ['/', 'find'],
  ['?', 'help'],
];
const T = D.n_tokens,
  L = D.n_layers,
  NS = 2 * L + 1,
  N = D.tokens.length;
const $ = id => document.getElementById(id);
const piece = id => D.pieces[id] ?? `#${id}`;
const pct = p => word('percent', {n: p >= 0.0995 ? Math.round(p * 100) : p >= 0.001 ? (p * 100).toFixed(1) : '<0.1'});
const half = s => (s === 0 ? 'embed' : `${s % 2 ? 'attn' : 'ffn'} ${(s - 1) >> 1}`);
const sig = x => (Math.abs(x) >= 1000 ? x.toFixed(0) : Number(x.toPrecision(3)).toString());
const clamp = (x, a, b) => Math.max(a, Math.min(b, x));

/* Text enters the page here and nowhere else, as text nodes. */
function h(tag, props, ...kids) {
  const svg = ['svg', 'path', 'rect', 'line', 'text', 'g', 'title', 'circle'].includes(tag);
  const e = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(props || {})) {
    if (v === undefined || v === null || v === false) continue;
    if (k.startsWith('on')) e.addEventListener(k.slice(2), v);
    else if (k === 'style') for (const [a, b] of Object.entries(v)) e.style.setProperty(a, b);
    else e.setAttribute(k, v === true ? '' : v);
  }
  for (const kid of kids.flat(Infinity)) if (kid !== null && kid !== undefined && kid !== false) e.append(kid);
  return e;
}
const put = (e, ...kids) =>
  e.replaceChildren(...kids.flat(Infinity).filter(k => k !== null && k !== undefined && k !== false));

/* Packed numbers. */
const canInflate = typeof DecompressionStream !== 'undefined';

async function unpack(id, Type) {
  const e = $(id);
  if (!e || !canInflate) return null;
  const text = atob(e.textContent),
    bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return new Type(await new Response(stream).arrayBuffer());
}
const cache = new Map();
const numbers = (id, Type) => {
  if (!cache.has(id)) cache.set(id, unpack(id, Type));
  return cache.get(id);
};
const A = {};

/* What is selected; one selection drives every panel, and it is in the address. */
const state = {token: D.selected, layer: NS - 1, head: null, step: 0, mode: 'raw', halves: false, stat: 'entropy'};

function readHash() {
  const q = new URLSearchParams(location.hash.slice(1));
  const number = (key, top) =>
    q.has(key) && Number.isFinite(+q.get(key)) ? clamp(Math.trunc(+q.get(key)), 0, top) : null;
  state.token = number('t', T - 1) ?? D.selected;
  state.layer = number('l', NS - 1) ?? NS - 1;
  state.step = number('s', D.steps.length - 1) ?? 0;
  state.head = number('h', 4095);
  state.mode = ['raw', 'apart', 'value'].includes(q.get('m')) ? q.get('m') : 'raw';
  const att = attentionOf(state.layer);
  if (state.head !== null && (!att || state.head >= att.heads)) state.head = null;
}

function go(change, quiet) {
  Object.assign(state, change);
  const att = attentionOf(state.layer);
  if (state.head !== null && (!att || state.head >= att.heads)) state.head = null;
  const q = new URLSearchParams({t: state.token, l: state.layer, s: state.step});
  if (state.head !== null) q.set('h', state.head);
  if (state.mode !== 'raw') q.set('m', state.mode);
  try {
    history[quiet ? 'replaceState' : 'pushState'](null, '', '#' + q);
  } catch {
    location.hash = q;
  }
  render();
}
const layerOf = s => (s === 0 ? -1 : (s - 1) >> 1);
const attentionOf = s => (s === 0 ? null : D.attention[layerOf(s)]);
const say = text => {
  $('live').textContent = text;
};

/* Colours. */
let palette = null;

function colours() {
  const css = getComputedStyle(document.documentElement);
  const get = name => css.getPropertyValue(name).trim();
  const rgb = name => [1, 3, 5].map(i => parseInt(get(name).slice(i, i + 2), 16));
  palette = {
    stops: ['--c0', '--c1', '--c2', '--c3'].map(rgb),
    ink: get('--ink'),
    soft: get('--soft'),
    line: get('--line'),
    bg: get('--bg'),
    panel: get('--panel'),
    attn: get('--attn'),
    ffn: get('--ffn'),
    hatch: get('--hatch'),
    pick: get('--pick'),
  };
}

function ramp(x) {
  const at = clamp(x, 0, 1) * 3,
    i = Math.min(2, Math.floor(at)),
    f = at - i;
  return palette.stops[i].map((c, k) => Math.round(c + (palette.stops[i + 1][k] - c) * f));
}
const css = c => `rgb(${c[0]},${c[1]},${c[2]})`;
const luminance = c => {
  const [r, g, b] = c.map(v => {
    v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const textOn = c => (luminance(c) > 0.179 ? '#000' : '#fff');

function hatch(ctx, x, y, w, hgt) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, hgt);
  ctx.clip();
  ctx.strokeStyle = palette.hatch;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let k = -hgt; k < w; k += 6) {
    ctx.moveTo(x + k, y + hgt);
    ctx.lineTo(x + k + hgt, y);
  }
  ctx.stroke();
  ctx.restore();
}

function sized(canvas, w, hgt) {
  const dpr = Math.min(2, window.devicePixelRatio || 1);
  canvas.width = Math.max(1, Math.round(w * dpr));
  canvas.height = Math.max(1, Math.round(hgt * dpr));
  canvas.style.width = w + 'px';
  canvas.style.height = hgt + 'px';
  const ctx = canvas.getContext('2d');
  ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
  ctx.clearRect(0, 0, w, hgt);
  return ctx;
}
