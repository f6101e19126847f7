'use strict';
(() => {
const D = JSON.parse(document.getElementById('data').textContent);
/* All words come from the page's data, in its language; `word` fills their {places} in. */
const word = (key, values = {}) => D.texts[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
const STATISTICS = ['entropy', 'sink', 'distance', 'previous', 'induction'];
const statistic = k => word('stat_' + k);
const KEYS = [['← →', 'token'], ['↑ ↓', 'layer'], ['[ ]', 'head'], ['n p', 'step'], ['Enter', 'open'], ['Esc', 'close'],
  ['s', 'sinks'], ['v', 'value'], ['d', 'theme'], ['/', 'find'], ['?', 'help']];
const T = D.n_tokens, L = D.n_layers, NS = 2 * L + 1, N = D.tokens.length;
const $ = id => document.getElementById(id);
const piece = id => D.pieces[id] ?? `#${id}`;
const pct = p => word('percent', {n: p >= 0.0995 ? Math.round(p * 100) : p >= 0.001 ? (p * 100).toFixed(1) : '<0.1'});
const half = s => s === 0 ? 'embed' : `${s % 2 ? 'attn' : 'ffn'} ${(s - 1) >> 1}`;
const sig = x => Math.abs(x) >= 1000 ? x.toFixed(0) : Number(x.toPrecision(3)).toString();
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
const put = (e, ...kids) => e.replaceChildren(...kids.flat(Infinity).filter(k => k !== null && k !== undefined && k !== false));

/* Packed numbers. */
const canInflate = typeof DecompressionStream !== 'undefined';
async function unpack(id, Type) {
  const e = $(id);
  if (!e || !canInflate) return null;
  const text = atob(e.textContent), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return new Type(await new Response(stream).arrayBuffer());
}
const cache = new Map();
const numbers = (id, Type) => { if (!cache.has(id)) cache.set(id, unpack(id, Type)); return cache.get(id); };
const A = {};

/* What is selected; one selection drives every panel, and it is in the address. */
const state = {token: D.selected, layer: NS - 1, head: null, step: 0, mode: 'raw', halves: false, stat: 'entropy'};
function readHash() {
  const q = new URLSearchParams(location.hash.slice(1));
  const number = (key, top) => q.has(key) && Number.isFinite(+q.get(key)) ? clamp(Math.trunc(+q.get(key)), 0, top) : null;
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
  try { history[quiet ? 'replaceState' : 'pushState'](null, '', '#' + q); } catch { location.hash = q; }
  render();
}
const layerOf = s => s === 0 ? -1 : (s - 1) >> 1;
const attentionOf = s => s === 0 ? null : D.attention[layerOf(s)];
const say = text => { $('live').textContent = text; };

/* Colours. */
let palette = null;
function colours() {
  const css = getComputedStyle(document.documentElement);
  const get = name => css.getPropertyValue(name).trim();
  const rgb = name => [1, 3, 5].map(i => parseInt(get(name).slice(i, i + 2), 16));
  palette = {stops: ['--c0', '--c1', '--c2', '--c3'].map(rgb), ink: get('--ink'), soft: get('--soft'), line: get('--line'),
    bg: get('--bg'), panel: get('--panel'), attn: get('--attn'), ffn: get('--ffn'), hatch: get('--hatch'), pick: get('--pick')};
}
function ramp(x) {
  const at = clamp(x, 0, 1) * 3, i = Math.min(2, Math.floor(at)), f = at - i;
  return palette.stops[i].map((c, k) => Math.round(c + (palette.stops[i + 1][k] - c) * f));
}
const css = c => `rgb(${c[0]},${c[1]},${c[2]})`;
const luminance = c => {
  const [r, g, b] = c.map(v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const textOn = c => luminance(c) > 0.179 ? '#000' : '#fff';
function hatch(ctx, x, y, w, hgt) {
  ctx.save();
  ctx.beginPath(); ctx.rect(x, y, w, hgt); ctx.clip();
  ctx.strokeStyle = palette.hatch; ctx.lineWidth = 1;
  ctx.beginPath();
  for (let k = -hgt; k < w; k += 6) { ctx.moveTo(x + k, y + hgt); ctx.lineTo(x + k + hgt, y); }
  ctx.stroke(); ctx.restore();
}
function sized(canvas, w, hgt) {
  const dpr = Math.min(2, window.devicePixelRatio || 1);
  canvas.width = Math.max(1, Math.round(w * dpr)); canvas.height = Math.max(1, Math.round(hgt * dpr));
  canvas.style.width = w + 'px'; canvas.style.height = hgt + 'px';
  const ctx = canvas.getContext('2d');
  ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
  ctx.clearRect(0, 0, w, hgt);
  return ctx;
}

/* The frame of the page. */
const CW = 68, RAIL = 132;
const strip = h('div', {class: 'strip'});
const lensCanvas = h('canvas', {class: 'chart', tabindex: 0, role: 'img'});
const lensHolder = h('div', {class: 'sticky'}, lensCanvas);
const inner = h('div', {style: {width: RAIL + N * CW + 'px'}}, strip, lensHolder);
const scroller = h('div', {class: 'scroll'}, inner);
const lensTable = h('div', {class: 'tablebox', hidden: true});
const detail = h('aside', {class: 'panel', 'aria-label': word('selected')});
const says = h('p', {class: 'says'});
const funnelBox = h('div'), writesBox = h('div'), choicesBox = h('div'), overviewBox = h('div');
const overlay = h('section', {class: 'panel overlay', hidden: true, role: 'dialog', 'aria-modal': 'true', tabindex: -1});
const findBox = h('input', {type: 'search', placeholder: word('find'), 'aria-label': word('find'), onkeydown: e => { if (e.key === 'Enter') find(e.target.value); }});
const halvesButton = h('button', {'aria-pressed': 'false', onclick: () => { state.halves = !state.halves; render(); }}, word('halves'));
const tableButton = h('button', {'aria-pressed': 'false', onclick: () => {
  lensTable.hidden = !lensTable.hidden; tableButton.setAttribute('aria-pressed', String(!lensTable.hidden)); render();
}}, word('table'));
const tag = text => h('span', {class: 'tag'}, text);
put($('page'),
  h('header', {class: 'bar-top'}, h('h1', {}, `${D.model}`), h('span', {class: 'facts'},
    word('facts', D)),
    h('span', {class: 'tools'}, findBox, h('button', {onclick: theme}, word('theme')), h('button', {onclick: help, 'aria-label': word('keys')}, '?'))),
  says,
  !canInflate && h('p', {class: 'says', role: 'alert'}, word('no_inflate')),
  h('div', {class: 'grid'}, h('div', {class: 'column'},
    h('section', {class: 'panel', 'aria-label': word('lens')},
      h('header', {}, h('h2', {}, word('lens')), h('span', {class: 'crumb'}, word('lens_note')),
        h('span', {class: 'aside'}, h('span', {class: 'legend'}, word('rank_of', {n: D.n_vocab.toLocaleString('en')}), h('i'), '1'), halvesButton, tableButton)),
      scroller, lensTable),
    h('section', {class: 'panel', 'aria-label': word('funnel')}, funnelBox),
    h('div', {class: 'row2'}, h('section', {class: 'panel', 'aria-label': word('writes')}, writesBox),
      h('section', {class: 'panel', 'aria-label': word('choices')}, choicesBox))),
    detail),
  h('section', {class: 'panel wide', 'aria-label': word('overview')}, overviewBox),
  h('footer', {}, D.checks.map(c => h('p', {}, c)), [D.about_maps, ...D.notes].map(n => h('p', {}, n)),
    h('p', {}, word('attention_note') + ' ' + word('derived_note')),
    h('p', {}, `tinyllm ${D.version}` + (D.command ? ` · ${D.command}` : ''))),
  overlay);

/* Token strip: the x axis of the page. */
const tokenButtons = [];
function buildStrip() {
  put(strip, h('div', {class: 'rail', style: {width: RAIL + 'px'}}, h('span', {style: {width: '36px'}}, word('layer')),
    h('span', {style: {width: '46px'}}, '|h|'), h('span', {}, '+attn +ffn')));
  D.tokens.forEach((t, i) => {
    const bits = t.bits === null ? '' : word('surprise', {n: t.bits.toFixed(1)});
    const label = word('token', {i, token: t.text, id: t.id, bytes: t.hex}) + bits + (D.sinks.includes(i) ? ', ' + word('is_sink') : '');
    const classes = ['tok', t.kind, D.sinks.includes(i) && 'sink', i === D.n_prompt && 'first',
      t.group !== null && i > 0 && D.tokens[i - 1].group === t.group && 'joined'].filter(Boolean).join(' ');
    const button = h('button', {class: classes, title: label, 'aria-label': label, tabindex: -1, onclick: () => i < T ? go({token: i, ...stepAt(i)}) : go({step: i - D.n_prompt, token: i - 1})},
      h('small', {}, i), h('b', {dir: 'auto'}, t.text), h('small', {}, t.group === null ? t.id : t.hex));
    if (t.bits > 7) button.classList.add('hot');
    if (t.bits !== null) button.style.backgroundColor = `rgba(var(--surprise), ${clamp(t.bits / 14, 0, 1) * 0.75})`;
    tokenButtons.push(button);
    strip.append(button);
  });
}
const stepAt = token => { const i = D.steps.findIndex(s => s.position === token); return i >= 0 ? {step: i} : {}; };

/* Lens grid. Only what is in view is drawn. */
const rows = () => state.halves ? [...Array(NS).keys()].reverse() : [...Array(L + 1).keys()].map(l => l * 2).reverse();
const rowHeight = () => clamp(Math.floor(416 / rows().length), state.halves ? 12 : 13, 24);
function drawLens() {
  const all = rows(), rh = rowHeight(), w = scroller.clientWidth, hgt = all.length * rh + 2;
  const ctx = sized(lensCanvas, w, hgt), off = scroller.scrollLeft;
  lensHolder.style.width = w + 'px';
  const font = `${clamp(rh - 3, 9, 12)}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace`;
  ctx.font = font; ctx.textBaseline = 'middle';
  const first = Math.max(0, Math.floor(off / CW)), last = Math.min(T - 1, Math.ceil((off + w - RAIL) / CW));
  const scale = Math.log(D.n_vocab);
  ctx.save(); ctx.beginPath(); ctx.rect(RAIL, 0, w - RAIL, hgt); ctx.clip();
  if (A.ranks) for (let r = 0; r < all.length; r++) for (let t = first; t <= last; t++) {
    const s = all[r], at = s * T + t, x = RAIL + t * CW - off, y = r * rh + 1;
    if (A.ranks[at] < 0) { hatch(ctx, x, y, CW - 1, rh - 1); continue; }
    // Tied embeddings predict their own token before the first layer: no news, so that row is grey.
    const c = ramp(1 - Math.log(A.ranks[at] + 1) / scale), grey = s === 0 && D.tied;
    ctx.fillStyle = grey ? palette.bg : css(c); ctx.fillRect(x, y, CW - 1, rh - 1);
    ctx.fillStyle = grey ? palette.soft : textOn(c);
    ctx.font = A.ranks[at] === 0 ? 'bold ' + font : font;
    ctx.fillText(fitted(ctx, piece(A.ids[at * 5]), CW - 6), x + 3, y + rh / 2);
  }
  const row = all.indexOf(state.layer), x = RAIL + state.token * CW - off;
  ctx.strokeStyle = palette.pick; ctx.lineWidth = 1; ctx.globalAlpha = 0.45;
  ctx.strokeRect(x - 0.5, 0.5, CW, hgt - 1);
  if (row >= 0) ctx.strokeRect(RAIL - off, row * rh + 0.5, T * CW, rh);
  ctx.globalAlpha = 1; ctx.lineWidth = 2;
  if (row >= 0) ctx.strokeRect(x, row * rh + 1, CW - 1, rh - 1);
  ctx.restore();
  drawRail(ctx, all, rh);
  lensCanvas.setAttribute('aria-label', `${word('lens')}: ${word('rows', {n: all.length, m: T})}. ` + lensWords());
}
function drawRail(ctx, all, rh) {
  ctx.font = '10px system-ui, sans-serif'; ctx.textBaseline = 'middle';
  const t = state.token;
  let low = Infinity, high = 0, most = 1e-9;
  if (A.norms) for (let s = 0; s < NS; s++) {
    const v = Math.max(1e-6, A.norms[s * T + t]);
    low = Math.min(low, v); high = Math.max(high, v);
    if (s) most = Math.max(most, A.writes[(s - 1) * T + t]);
  }
  const points = [];
  all.forEach((s, r) => {
    const y = r * rh + 1 + rh / 2;
    ctx.fillStyle = s === state.layer ? palette.pick : palette.soft;
    ctx.fillText(s === 0 ? 'embed' : state.halves ? half(s) : String(layerOf(s)), 2, y);
    if (!A.norms) return;
    const v = Math.max(1e-6, A.norms[s * T + t]);
    points.push([38 + 40 * (high > low ? Math.log(v / low) / Math.log(high / low) : 0.5), y]);
    if (s === 0) return;
    const bar = (state_, x, colour) => {
      const width = 22 * A.writes[(state_ - 1) * T + t] / most;
      ctx.fillStyle = colour; ctx.fillRect(x, y - rh / 4, Math.max(1, width), Math.max(2, rh / 2));
    };
    if (!state.halves || s % 2) bar(s % 2 ? s : s - 1, 84, palette.attn);
    if (s % 2 === 0) bar(s, 108, palette.ffn);
  });
  ctx.strokeStyle = palette.soft; ctx.lineWidth = 1.5; ctx.beginPath();
  points.forEach(([x, y], i) => i ? ctx.lineTo(x, y) : ctx.moveTo(x, y));
  ctx.stroke();
}
function fitted(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let chars = [...text];
  while (chars.length > 1 && ctx.measureText(chars.join('') + '…').width > width) chars = chars.slice(0, -1);
  return chars.join('') + '…';
}
function lensWords() {
  const at = state.layer * T + state.token;
  const where = word('at_token', {state: state.layer === 0 ? word('embedding') : half(state.layer), i: state.token, token: D.tokens[state.token].text});
  if (!A.ranks || A.ranks[at] < 0) return `${where}: ${word('not_read')}`;
  return `${where}: ` + word('lens_words', {token: piece(A.ids[at * 5]), p: pct(A.probs[at * 5] / 65535),
    answer: piece(D.answers[state.token]), rank: A.ranks[at] + 1});
}
function drawLensTable() {
  if (lensTable.hidden || !A.ranks) return;
  const t = state.token, names = ['layer', 'first', null, 'second', null, 'rank_of_answer', 'entropy_bits', 'kl_bits'];
  put(lensTable, h('table', {}, h('tr', {}, names.map(x => h('th', {}, x ? word(x) : 'p'))),
    rows().map(s => { const at = s * T + t; return A.ranks[at] < 0 ? null : h('tr', {}, h('td', {}, s ? half(s) : 'embed'),
      h('td', {class: 'piece'}, piece(A.ids[at * 5])), h('td', {}, pct(A.probs[at * 5] / 65535)),
      h('td', {class: 'piece'}, piece(A.ids[at * 5 + 1])), h('td', {}, pct(A.probs[at * 5 + 1] / 65535)),
      h('td', {}, A.ranks[at] + 1), h('td', {}, (A.entropy[at] / 2000).toFixed(2)), h('td', {}, (A.kl[at] / 1000).toFixed(2))); })));
}
function bar(name, share, number, extra, title) {
  return h('div', {class: 'bar ' + (extra || ''), title: title || name}, h('span', {class: 'name', dir: 'auto'}, name),
    h('span', {class: 'track'}, h('div', {class: 'fill', style: {width: clamp(share, 0, 1) * 100 + '%'}})), h('span', {class: 'num'}, number));
}

/* The selected layer at the selected token. */
let detailRun = 0;
async function drawDetail() {
  const run = ++detailRun, t = state.token, s = state.layer, l = layerOf(s), at = s * T + t, kids = [];
  const behind = D.tokens[t + 1];
  kids.push(h('header', {}, h('h2', {}, s === 0 ? word('embedding') : s % 2 ? word('behind_attention', {layer: word('layer_n', {n: l})}) : word('layer_n', {n: l})),
    h('span', {class: 'crumb'}, word('crumb', {step: state.step + 1, i: t, token: D.tokens[t].text}))));
  kids.push(h('div', {class: 'facts2'}, word('id', D.tokens[t]), h('span', {}, word('bytes', {bytes: D.tokens[t].hex})),
    D.sinks.includes(t) && h('span', {}, word('is_sink')), behind && h('span', {}, word('predicts', {i: t + 1, token: behind.text}))));
  if (A.ranks) {
    kids.push(h('h3', {}, word('would_say') + ' ', tag(word('derived'))));
    if (A.ranks[at] < 0) kids.push(word('not_read'));
    else {
      for (let k = 0; k < 5; k++) {
        const p = A.probs[at * 5 + k] / 65535, id = A.ids[at * 5 + k];
        kids.push(bar(piece(id), p, pct(p), id === D.answers[t] ? 'won' : ''));
      }
      kids.push(h('div', {class: 'facts2'}, word('answer_rank', {token: piece(D.answers[t]), rank: A.ranks[at] + 1}),
        h('span', {}, word('entropy', {n: (A.entropy[at] / 2000).toFixed(2)})), h('span', {}, word('kl', {n: (A.kl[at] / 1000).toFixed(2)}))));
    }
  }
  const step = D.steps.find(x => x.position === t);
  if (step && step.leaders) kids.push(h('h3', {}, word('curve')), rankCurve(step));
  const att = attentionOf(s);
  const heads = h('div', {class: 'heads'});
  if (att) {
    const local = att.window ? word('sees_last', {n: att.window}) : '';
    kids.push(h('h3', {}, word('heads', {n: att.heads, kv: att.kv}) + local + ' ', tag(word('derived'))), looksWords(step, l), heads);
  }
  if (step && step.neurons[l]) kids.push(h('h3', {}, word('neurons'), ' ', tag(word('measured'))), neurons(step, l));
  else if (A.active && D.shapes.active.includes(l)) {
    kids.push(h('div', {class: 'facts2'}, word('active_above', {p: pct(A.active[D.shapes.active.indexOf(l) * T + t] / 65535)})));
  }
  const router = D.shapes.routers[l];
  if (router) kids.push(h('h3', {}, word('experts'), ' ', tag(word('measured'))), await experts(l, router, t));
  if (s === 0 && D.tokens[t].near.length) {
    kids.push(h('h3', {}, word('nearest')), D.tokens[t].near.map(([id, c]) => bar(piece(id), c, c.toFixed(2))));
  }
  if (A.stages) kids.push(stageTable(l, t));
  if (run !== detailRun) return;
  put(detail, kids);
  if (att) drawThumbs(heads, att, l);
}
function looksWords(step, l) {
  if (!step || !step.looks[l] || !step.looks[l].length) return null;
  return h('div', {class: 'facts2'}, word('looks_at', {list: step.looks[l].slice(0, 3).map(([t, p]) => `${t} ${D.tokens[t].text} ${pct(p)}`).join(', ')}));
}
function rankCurve(step) {
  const W = 340, H = 96, marks = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#7a7a7a', '#a09000'];
  const order = step.leaders.ids.map((id, i) => i).sort((a, b) => step.leaders.ranks[a][NS - 1] - step.leaders.ranks[b][NS - 1]).slice(0, 8);
  const top = Math.log(D.n_vocab), x = s => 4 + s / (NS - 1) * (W - 84), y = r => 6 + Math.log(r + 1) / top * (H - 14);
  const svg = h('svg', {width: '100%', viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': word('curve') + ': ' + order.map(i =>
    word('ends_at', {token: piece(step.leaders.ids[i]), rank: step.leaders.ranks[i][NS - 1] + 1})).join(', ')});
  svg.append(h('line', {x1: x(state.layer), x2: x(state.layer), y1: 0, y2: H, stroke: 'currentColor', 'stroke-opacity': 0.3}));
  const used = [];
  order.forEach((i, k) => {
    const ranks = step.leaders.ranks[i];
    svg.append(h('path', {d: ranks.map((r, s) => `${s ? 'L' : 'M'}${x(s).toFixed(1)} ${y(r).toFixed(1)}`).join(''), fill: 'none',
      stroke: marks[k], 'stroke-width': step.leaders.ids[i] === step.token ? 2.4 : 1.2, 'stroke-dasharray': k > 3 ? '3 2' : null}));
    let at = y(ranks[NS - 1]) + 3;
    while (used.some(u => Math.abs(u - at) < 10)) at += 5;
    if (at < H + 4) { used.push(at); svg.append(h('text', {x: W - 76, y: Math.min(at, H - 2), style: {fill: marks[k]}}, fit(piece(step.leaders.ids[i]), 12))); }
  });
  return svg;
}
const fit = (text, n) => [...text].length > n ? [...text].slice(0, n - 1).join('') + '…' : text;
function neurons(step, l) {
  const c = step.carriers[l];
  return [h('div', {class: 'facts2'}, A.active && word('active', {p: pct(A.active[D.shapes.active.indexOf(l) * T + step.position] / 65535)}),
    c && c[0] > 0 && h('span', {}, word('carriers', {a: c[0], b: c[1]}))),
  h('div', {class: 'tablebox'}, h('table', {}, h('tr', {}, ['neuron', 'activation', 'promotes'].map((x, i) => h('th', {class: i > 1 && 'piece'}, word(x)))),
    step.neurons[l].map(n => h('tr', {title: word('suppresses', {list: n[4].map(piece).join(' ')})}, h('td', {}, n[0]), h('td', {}, sig(n[1])),
      h('td', {class: 'piece'}, n[3].map(id => fit(piece(id), 11)).join('  '))))))];
}
async function experts(l, router, t) {
  const probs = await numbers(`router-${l}`, Uint16Array), [n, ids, weights] = router;
  const shown = [...Array(n).keys()].sort((a, b) => probs[t * n + b] - probs[t * n + a]).slice(0, Math.max(8, ids[t].length));
  return shown.map(e => { const k = ids[t].indexOf(e), p = probs[t * n + e] / 65535;
    return bar(word('expert', {n: e}), p, pct(p), k >= 0 ? 'won' : '', k >= 0 ? word('chosen_weight', {w: sig(weights[t][k])}) : word('not_chosen')); });
}
function stageTable(l, t) {
  const body = [];
  D.shapes.stages.forEach(([stage, layer, width, ms, histogram], i) => {
    if (layer !== (l < 0 ? null : l)) return;
    const [n, lo, hi] = [0, 1, 2].map(k => A.stages[(i * 3 + k) * T + t]), most = Math.max(...histogram);
    body.push(h('tr', {}, h('td', {}, stage), h('td', {}, width), h('td', {}, sig(n)), h('td', {}, sig(lo)), h('td', {}, sig(hi)),
      h('td', {}, h('svg', {width: 48, height: 12, 'aria-hidden': 'true'}, histogram.map((v, k) =>
        h('rect', {x: k * 3, width: 2, y: 12 - 12 * v / most, height: 12 * v / most, fill: 'currentColor'})))), h('td', {}, ms)));
  });
  return h('details', {}, h('summary', {}, word('stages'), ' ', tag(word('measured'))), h('div', {class: 'tablebox'}, h('table', {},
    h('tr', {}, ['stage', 'width', 'norm', 'min', 'max', 'last_token', null].map(x => h('th', {}, x ? word(x) : 'ms'))), body)));
}

/* Attention. */
const present = D.attention.map((a, i) => a ? i : -1).filter(i => i >= 0);
const headsBefore = l => present.filter(i => i < l).reduce((n, i) => n + D.attention[i].heads, 0);
async function drawThumbs(holder, att, l) {
  const thumbs = await numbers('thumbs', Uint8Array);
  if (!thumbs || !holder.isConnected) return;
  const n = Math.min(32, T), group = att.heads / att.kv;
  for (let g = 0; g < att.kv; g++) {
    const cells = [];
    for (let k = g * group; k < (g + 1) * group; k++) {
      if (D.shown_heads && !D.shown_heads.includes(k)) continue;
      const canvas = h('canvas', {'aria-hidden': 'true'});
      canvas.width = canvas.height = n;
      paintSquare(canvas, n, (r, c) => c > r ? -1 : thumbs[((headsBefore(l) + k) * n + r) * n + c] / 15);
      const words = ['entropy', 'sink'].filter(x => att[x]).map(x => `${statistic(x)} ${att[x][k].toFixed(2)}`).join(', ');
      cells.push(h('button', {class: 'thumb', 'aria-pressed': String(state.head === k), title: words, 'aria-label': `${word('head', {n: k})}: ${words}`,
        onclick: () => go({head: k})}, canvas, word('head', {n: k})));
    }
    if (cells.length) holder.append(h('div', {class: 'kv'}, word('kv', {n: g}), h('div', {}, cells)));
  }
}
/* value(r, c) in 0..1, or below 0 for cells that do not exist, which stay see-through. */
function paintSquare(canvas, n, value) {
  const ctx = canvas.getContext('2d'), image = ctx.createImageData(n, n);
  for (let r = 0; r < n; r++) for (let c = 0; c < n; c++) {
    const v = value(r, c), at = (r * n + c) * 4;
    if (v < 0) continue;
    const [red, green, blue] = ramp(v);
    image.data[at] = red; image.data[at + 1] = green; image.data[at + 2] = blue; image.data[at + 3] = 255;
  }
  ctx.putImageData(image, 0, 0);
}
/* Readers of one layer's maps: probabilities of a head's row, or null where none is stored. */
async function mapOf(l) {
  const codes = await numbers(`attn-${l}`, Uint8Array), att = D.attention[l], bits = D.coding.bits, top = 2 ** bits - 1;
  const fine = await Promise.all(D.steps.map((s, i) => numbers(`row-${i}`, Uint8Array)));
  const values = await numbers('value-norms', Uint16Array);
  const kept = T - att.first, q0 = att.first + (D.coding.last_queries ? Math.max(0, kept - D.coding.last_queries) : 0);
  const before = q => (q * (q + 1) - q0 * (q0 + 1)) / 2, perHead = before(T);
  const raw = (head, q) => {
    const i = D.steps.findIndex(s => s.position === q), row = new Float32Array(q + 1);
    if (i >= 0 && fine[i]) {
      const at = (headsBefore(l) + head) * (q + 1);
      for (let c = 0; c <= q; c++) row[c] = (fine[i][at + c] / 255) ** 2;
      return row;
    }
    if (!codes || q < q0) return null;
    const at = head * perHead + before(q);
    for (let c = 0; c <= q; c++) {
      const k = at + c, code = bits > 4 ? codes[k] : k & 1 ? codes[k >> 1] >> 4 : codes[k >> 1] & 15;
      row[c] = (code / top) ** 2;
    }
    return row;
  };
  const shown = (head, q, mode) => {
    const row = raw(head, q);
    if (!row || mode === 'raw') return row;
    for (let c = 0; c <= q; c++) {
      if (mode === 'apart' && D.sinks.includes(c)) row[c] = 0;
      if (mode === 'value' && values) row[c] *= values[(headsBefore(l) + head) * T + c];
    }
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    return row.map(v => v / sum);
  };
  return {shown, raw, hasMap: !!codes, hasValues: !!values};
}
let headRun = 0;
async function drawHead() {
  const run = ++headRun, att = attentionOf(state.layer);
  if (state.head === null || !att) { if (overlay.dataset.kind === 'head') overlay.hidden = true; return; }
  const l = layerOf(state.layer), head = state.head, map = await mapOf(l);
  if (run !== headRun) return;
  const q = state.token, row = map.shown(head, q, state.mode);
  const room = Math.min(640, window.innerWidth - 60), size = T > room ? room : Math.floor(room / T) * T;
  const canvas = h('canvas', {class: 'chart', tabindex: 0, role: 'img', onkeydown: keys, onclick: e => {
    const box = canvas.getBoundingClientRect();
    go({token: clamp(Math.floor((e.clientY - box.top) / box.height * T), 0, T - 1)}, true);
  }});
  const modes = h('span', {class: 'aside'}, ['raw', 'apart', 'value'].map(m =>
    (m !== 'value' || map.hasValues) && h('button', {'aria-pressed': String(state.mode === m), onclick: () => go({mode: m}, true)}, word(m))),
    h('button', {onclick: () => go({head: null})}, word('close')));
  const share = map.raw(head, q), sink = share ? D.sinks.filter(c => c <= q).reduce((a, c) => a + share[c], 0) : 0;
  const best = row ? [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 5) : [];
  const words = row ? best.map(c => `${c} ${D.tokens[c].text} ${pct(row[c])}`).join(', ') : word('no_row');
  put(overlay,
    h('header', {}, h('h2', {}, word('head_title', {l, h: head, g: Math.floor(head / (att.heads / att.kv))})), tag(word('derived')), modes),
    h('div', {class: 'headgrid'}, h('div', {}, map.hasMap ? canvas : word('no_map'),
      h('div', {class: 'legend'}, '√p: 0', h('i'), '1', h('span', {}, ' ' + word(state.mode === 'apart' ? 'hatched_sinks' : 'hatched')))),
      h('div', {}, h('h3', {}, word('query', {i: q, token: D.tokens[q].text})), best.map(c => bar(`${c} ${D.tokens[c].text}`, row[c], pct(row[c]))),
        h('div', {class: 'facts2'}, word('sinks', {p: pct(sink)}), att.window ? h('span', {}, word('window', {n: att.window})) : null,
          STATISTICS.map(k => att[k] && h('span', {}, `${statistic(k)} ${att[k][head].toFixed(2)}`))),
        h('h3', {}, word('on_text')),
        h('div', {class: 'painted mono'}, D.tokens.slice(0, T).map((t, c) => {
          const visible = c <= q && (!att.window || c > q - att.window);
          const style = {}; if (row && visible) { const x = ramp(Math.sqrt(row[c])); style.background = css(x); style.color = textOn(x); }
          return h('span', {style, dir: 'auto', class: c === q ? 'query' : visible ? '' : 'absent', title: row && visible ? pct(row[c]) : ''}, t.text, '\u200b');
        })))));
  canvas.setAttribute('aria-label', word('head_words', {l, h: head, i: q, words}));
  overlay.dataset.kind = 'head';
  if (overlay.hidden) { overlay.hidden = false; overlay.focus(); }
  if (map.hasMap) paintHead(canvas, map, head, att, size);
  if (document.activeElement === overlay || document.activeElement === document.body) canvas.focus({preventScroll: true});
  say(words);
}
function paintHead(canvas, map, head, att, size) {
  const ctx = sized(canvas, size, size), small = document.createElement('canvas'), q = state.token;
  small.width = small.height = T;
  const all = [...Array(T).keys()].map(r => map.shown(head, r, state.mode));
  paintSquare(small, T, (r, c) => c > r || (att.window && c <= r - att.window) || !all[r] || (state.mode === 'apart' && D.sinks.includes(c)) ? -1 : Math.sqrt(all[r][c]));
  hatch(ctx, 0, 0, size, size);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(small, 0, 0, size, size);
  const cell = size / T;
  ctx.strokeStyle = palette.pick; ctx.lineWidth = 1.5; ctx.strokeRect(0, q * cell, (q + 1) * cell, Math.max(2, cell));
  ctx.strokeStyle = palette.line; ctx.strokeRect(0, 0, size, size);
}
function drawOverview() {
  const stats = STATISTICS.filter(k => present.some(l => D.attention[l][k]));
  if (!stats.length) { overviewBox.closest('section').hidden = true; return; }
  const k = state.stat, most = Math.max(...present.flatMap(l => D.attention[l][k] || [0]), 1e-9), top = k === 'distance' ? most : 1;
  const widest = Math.max(...present.map(l => D.attention[l].heads));
  const cw = clamp(Math.floor(Math.min(1200, window.innerWidth - 90) / present.length), 9, 34), rh = 15;
  const canvas = h('canvas', {class: 'chart', tabindex: 0, role: 'img', 'aria-label': `${word('overview')}: ${word('overview_words', {what: statistic(k), n: present.length, m: widest})}`,
    onkeydown: keys, onclick: e => {
      const box = canvas.getBoundingClientRect(), x = Math.floor((e.clientX - box.left - 28) / cw), y = Math.floor((e.clientY - box.top) / rh);
      if (x >= 0 && x < present.length && y >= 0 && y < D.attention[present[x]].heads) go({layer: 2 * present[x] + 2, head: y});
    }});
  put(overviewBox, h('header', {class: 'bar-top'}, h('h2', {}, word('overview')), stats.map(x =>
    h('button', {'aria-pressed': String(x === k), onclick: () => { state.stat = x; drawOverview(); }}, statistic(x))),
    h('span', {class: 'legend'}, '0', h('i'), top === 1 ? '1' : sig(top)), h('span', {class: 'crumb'}, word('overview_note'))),
  h('div', {class: 'tablebox'}, canvas));
  const ctx = sized(canvas, 28 + present.length * cw + 2, widest * rh + 16);
  ctx.font = '9px system-ui, sans-serif'; ctx.textBaseline = 'middle';
  present.forEach((l, i) => {
    const att = D.attention[l];
    for (let head = 0; head < att.heads; head++) {
      const gap = head % (att.heads / att.kv) === 0 ? 1 : 0;
      ctx.fillStyle = css(ramp((att[k] ? att[k][head] : 0) / top));
      ctx.fillRect(28 + i * cw, head * rh + gap, cw - 1, rh - 1 - gap);
      if (!i) { ctx.fillStyle = palette.soft; ctx.fillText(head, 4, head * rh + rh / 2); }
    }
    ctx.fillStyle = att.window ? palette.ffn : palette.soft;
    if (i % Math.ceil(18 / cw) === 0) ctx.fillText((att.window ? 'w' : '') + l, 29 + i * cw, widest * rh + 8);
    if (l === layerOf(state.layer)) { ctx.strokeStyle = palette.pick; ctx.strokeRect(27.5 + i * cw, 0.5, cw, widest * rh); }
  });
}

/* Sampling: what happened, and what would happen with other settings. */
const NAMES = {top_k: 'top-k', top_p: 'top-p', min_p: 'min-p', typ_p: 'typical', temperature: word('temperature'), penalties: word('penalties')};
const knobs = {...D.params};
function drawFunnel() {
  const step = D.steps[state.step], kids = [];
  const changed = Object.keys(knobs).some(k => knobs[k] !== D.params[k]);
  kids.push(h('header', {class: 'bar-top'}, h('h2', {}, word('funnel')), h('span', {class: 'crumb'},
    word('step_chosen', {step: state.step + 1, i: step.position, token: D.tokens[step.position].text, chosen: piece(step.token)})),
    tag(word(changed ? 'recomputed' : step.funnel ? 'measured' : 'derived'))));
  kids.push(h('div', {class: 'funnel'}, changed || !step.funnel ? recomputed(step) : happened(step)));
  const slider = (key, name, min, max, by) => {
    const out = h('output', {}, knobs[key]);
    return h('label', {}, name, h('input', {type: 'range', min, max, step: by, value: knobs[key], oninput: e => {
      knobs[key] = +e.target.value; out.textContent = knobs[key];
      put(kids.at(-2), recomputed(step));
    }, onchange: drawFunnel}), out);
  };
  kids.push(h('div', {class: 'sliders'}, h('b', {}, word('what_if')), slider('temperature', word('temperature'), 0, 2, 0.05), slider('top_k', 'top-k', 0, 100, 1),
    slider('top_p', 'top-p', 0, 1, 0.01), slider('min_p', 'min-p', 0, 0.5, 0.01),
    changed && h('button', {onclick: () => { Object.assign(knobs, D.params); drawFunnel(); }}, word('reset'))));
  put(funnelBox, kids);
}
const N_SHOWN = 8;
const keeps = (a, b, kept) => a < b ? word('keeps', {a, b: b.toLocaleString('en'), p: pct(kept)}) : word('candidates', {n: a.toLocaleString('en')});
function happened(step) {
  const f = step.funnel, columns = f.stages.map(stage => {
    const left = keeps(stage.after, stage.before, stage.kept);
    return h('div', {class: 'stage'}, h('h3', {}, NAMES[stage.stage] || stage.stage, stage.setting === null ? '' : ` ${stage.setting}`),
      h('div', {class: 'facts2'}, left), stage.candidates.slice(0, N_SHOWN).map(c =>
        bar(c.token, stage.stage === 'temperature' ? c.after : c.before, pct(stage.stage === 'temperature' ? c.after : c.before),
          (c.after === 0 ? 'gone ' : '') + (c.id === f.draw.token ? 'won' : ''), `${c.token}: ${pct(c.before)} → ${pct(c.after)}`)));
  });
  if (f.draw.u === null) return [...columns, h('div', {class: 'stage'}, h('h3', {}, word('most_probable')),
    step.alternatives.slice(0, N_SHOWN).map(([id, p]) => bar(piece(id), p, pct(p), id === step.token ? 'won' : '')))];
  return [...columns, drawColumn(f.draw.candidates.map(c => [c.id, c.probability]), f.draw)];
}
function drawColumn(candidates, draw) {
  const W = 150, H = 170, svg = h('svg', {width: W, height: H, role: 'img', 'aria-label': word('falls_on', {u: draw.u.toFixed(3), token: piece(draw.token)})});
  let from = 0;
  candidates.forEach(([id, p], i) => {
    svg.append(h('rect', {x: 22, width: 26, y: from * (H - 4) + 2, height: Math.max(0.5, p * (H - 4) - 0.5), fill: id === draw.token ? 'var(--ffn)' : i % 2 ? 'var(--c2)' : 'var(--c1)', stroke: 'var(--line)'}, h('title', {}, `${piece(id)} ${pct(p)}`)));
    if (p > 0.06) svg.append(h('text', {x: 54, y: (from + p / 2) * (H - 4) + 5}, fit(`${piece(id)} ${pct(p)}`, 15)));
    from += p;
  });
  const y = draw.u * (H - 4) + 2;
  svg.append(h('path', {d: `M4 ${y - 5}L20 ${y}L4 ${y + 5}Z`, fill: 'var(--pick)'}), h('line', {x1: 18, x2: 50, y1: y, y2: y, stroke: 'var(--pick)', 'stroke-width': 1.5}));
  const range = {u: draw.u.toFixed(3), a: draw.below.toFixed(3), b: (draw.below + draw.probability).toFixed(3)};
  return h('div', {class: 'stage'}, h('h3', {}, word('draw')), h('div', {class: 'facts2'}, word('u_in', range)), svg);
}
function recomputed(step) {
  const w = step.what_if, columns = [];
  let list = w.ids.map((id, i) => ({id, x: w.logits[i]}));
  const top = list[0].x;
  const rest = w.bins.reduce((sum, n, i) => sum + n * Math.exp(w.low + (i + 0.5) * (w.high - w.low) / w.bins.length - top), 0);
  let other = rest, n = D.n_vocab;
  const probs = () => { const e = list.map(c => Math.exp(c.x - list[0].x)), sum = e.reduce((a, b) => a + b, 0) + other; return e.map(v => v / sum); };
  const stage = (name, keep) => {
    const p = probs(), count = keep(p), was = n;
    const kept = p.slice(0, count).reduce((a, b) => a + b, 0) + (count >= list.length && n > list.length ? 1 - p.reduce((a, b) => a + b, 0) : 0);
    if (count < list.length || count < n) { if (count <= list.length) { other = 0; n = count; } }
    columns.push(h('div', {class: 'stage'}, h('h3', {}, name), h('div', {class: 'facts2'}, keeps(n, was, kept)),
      list.slice(0, N_SHOWN).map((c, i) => bar(piece(c.id), p[i], pct(p[i]), (i >= count ? 'gone ' : '') + (c.id === step.token ? 'won' : '')))));
    list = list.slice(0, Math.max(1, count));
  };
  const all = () => n > list.length ? Infinity : list.length;
  if (knobs.temperature > 0) {
    if (knobs.top_k > 0) stage(`top-k ${knobs.top_k}`, () => knobs.top_k);
    if (knobs.top_p < 1) stage(`top-p ${knobs.top_p}`, p => { let sum = 0; const i = p.findIndex(v => (sum += v) >= knobs.top_p); return i < 0 ? all() : i + 1; });
    if (knobs.min_p > 0) stage(`min-p ${knobs.min_p}`, p => { const i = p.findIndex(v => v < knobs.min_p * p[0]); return i < 0 ? all() : i; });
    list = list.map(c => ({id: c.id, x: c.x / knobs.temperature}));
    if (other) other = w.bins.reduce((sum, k, i) => sum + k * Math.exp((w.low + (i + 0.5) * (w.high - w.low) / w.bins.length - top) / knobs.temperature), 0);
    stage(`${word('temperature')} ${knobs.temperature}`, all);
  } else stage(word('greedy'), () => 1);
  const u = step.funnel && step.funnel.draw.u, p = probs();
  if (u !== null && u !== undefined && knobs.temperature > 0) {
    let sum = 0, i = p.findIndex(v => (sum += v) > u); if (i < 0) i = p.length - 1;
    const below = p.slice(0, i).reduce((a, b) => a + b, 0);
    columns.push(drawColumn(list.map((c, k) => [c.id, p[k]]), {u, token: list[i].id, below, probability: p[i]}));
  }
  return columns;
}

/* Who wrote the logit: a waterfall along the layers. */
function drawWrites() {
  const step = D.steps[state.step], W = clamp(writesBox.clientWidth, 280, 1200), H = 150, parts = step.parts;
  const sums = [0]; parts.forEach(p => sums.push(sums.at(-1) + p));
  const low = Math.min(...sums), high = Math.max(...sums), y = v => 8 + (high - v) / (high - low || 1) * (H - 26), bw = (W - 46) / NS;
  const best = [...parts.keys()].sort((a, b) => Math.abs(parts[b]) - Math.abs(parts[a])).slice(0, 4);
  const svg = h('svg', {width: W, height: H, role: 'img', class: 'chart', tabindex: 0, onkeydown: keys,
    'aria-label': `${word('writes')}: ` + best.map(s => `${half(s)} ${parts[s].toFixed(2)}`).join(', ')});
  [low, 0, high].forEach(v => { if (v === 0 || v !== low || low < 0) svg.append(h('line', {x1: 34, x2: W, y1: y(v), y2: y(v), stroke: 'var(--line)'}), h('text', {x: 0, y: y(v) + 3}, v.toFixed(1))); });
  parts.forEach((p, s) => {
    const x = 38 + s * bw, a = y(sums[s]), b = y(sums[s + 1]);
    svg.append(h('rect', {x, width: Math.max(1, bw - 1), y: Math.min(a, b), height: Math.max(1, Math.abs(a - b)), fill: p >= 0 ? 'var(--up)' : 'var(--down)',
      'fill-opacity': s === state.layer ? 1 : 0.8, onclick: () => go({layer: s}), style: {cursor: 'pointer'}}, h('title', {}, `${half(s)} ${p >= 0 ? '+' : ''}${p.toFixed(2)}`)));
    if ((s % 2 === 0 && (layerOf(s) % Math.ceil(L / (W / 45))) === 0) || s === 0) svg.append(h('text', {x, y: H - 3}, s ? layerOf(s) : 'e'));
  });
  const used = [];
  best.forEach(s => {
    let at = Math.min(y(sums[s]), y(sums[s + 1])) - 3;
    while (used.some(([x0, y0]) => Math.abs(x0 - s) * bw < 80 && Math.abs(y0 - at) < 10)) at += 11;
    used.push([s, at]);
    const right = 38 + s * bw > W - 110;
    svg.append(h('text', {x: right ? 38 + s * bw - 4 : 38 + s * bw, y: Math.max(9, at), 'text-anchor': right ? 'end' : 'start', style: {fill: 'var(--ink)'}}, `${half(s)} ${parts[s] >= 0 ? '+' : ''}${parts[s].toFixed(1)}`));
  });
  put(writesBox, h('header', {class: 'bar-top'}, h('h2', {}, word('writes')), h('span', {class: 'crumb'}, word(step.centred ? 'over_mean' : 'uncentred', {token: piece(step.token)})), tag(word('derived'))),
    svg, h('div', {class: 'facts2'}, step.check, h('span', {}, word('not_cause'))),
    h('details', {}, h('summary', {}, word('table')), h('div', {class: 'tablebox'}, h('table', {}, h('tr', {}, [word('layer'), 'attn', 'ffn', word('sum_so_far')].map(x => h('th', {}, x))),
      h('tr', {}, h('td', {}, 'embed'), h('td', {}, parts[0].toFixed(3)), h('td', {}), h('td', {}, sums[1].toFixed(2))),
      [...Array(L).keys()].map(l => h('tr', {}, h('td', {}, l), h('td', {}, parts[2 * l + 1].toFixed(3)), h('td', {}, parts[2 * l + 2].toFixed(3)), h('td', {}, sums[2 * l + 3].toFixed(2))))))));
}

/* Generated tokens, each with its alternatives. */
function drawChoices() {
  const step = D.steps[state.step];
  if (!step.alternatives) { put(choicesBox, h('h2', {}, word('choices')), h('p', {}, word('none_generated'))); return; }
  const rest = 1 - step.alternatives.reduce((a, [, p]) => a + p, 0);
  const place = step.alternatives.findIndex(([id]) => id === step.token);
  put(choicesBox, h('header', {class: 'bar-top'}, h('h2', {}, word('choices')), tag(word('measured'))),
    h('div', {class: 'pills'}, D.steps.map((s, i) => {
      const pill = h('button', {class: 'pill', dir: 'auto', 'aria-pressed': String(i === state.step), onclick: () => go({step: i, token: s.position})}, piece(s.token), h('small', {}, pct(s.probability)));
      pill.style.borderBottomColor = `rgba(var(--surprise), ${clamp(-Math.log2(s.probability) / 6, 0.05, 1)})`;
      return pill;
    })),
    h('h3', {}, word(place > 0 ? 'instead_number' : 'instead', {token: piece(step.token), n: place + 1})),
    step.alternatives.map(([id, p]) => bar(piece(id), p, pct(p), id === step.token ? 'won' : '')),
    bar(word('rest'), Math.max(0, rest), pct(Math.max(0, rest)), 'gone-not'));
}

/* Keys, find, help, theme. */
function keys(e) {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const all = rows(), row = all.indexOf(state.layer), att = attentionOf(state.layer);
  const moves = {
    ArrowLeft: () => go({token: Math.max(0, state.token - 1), ...stepAt(state.token - 1)}, true),
    ArrowRight: () => go({token: Math.min(T - 1, state.token + 1), ...stepAt(state.token + 1)}, true),
    ArrowUp: () => go({layer: all[Math.max(0, (row < 0 ? 0 : row) - 1)]}, true),
    ArrowDown: () => go({layer: all[Math.min(all.length - 1, row + 1)]}, true),
    '[': () => att && go({head: ((state.head ?? 0) + att.heads - 1) % att.heads}, true),
    ']': () => att && go({head: state.head === null ? 0 : (state.head + 1) % att.heads}, true),
    n: () => toStep(state.step + 1), p: () => toStep(state.step - 1),
    Enter: () => att && state.head === null && go({head: 0}),
    s: () => go({mode: state.mode === 'apart' ? 'raw' : 'apart'}, true),
    v: () => go({mode: state.mode === 'value' ? 'raw' : 'value'}, true),
    d: theme, '/': () => findBox.focus(), '?': help,
  };
  if (!moves[e.key]) return;
  e.preventDefault();
  moves[e.key]();
  if (e.key.startsWith('Arrow') && state.head === null) { reveal(); say(lensWords()); }
}
function toStep(i) { i = clamp(i, 0, D.steps.length - 1); go({step: i, token: D.steps[i].position}, true); reveal(); }
function reveal() {
  const x = state.token * CW, room = scroller.clientWidth - RAIL;
  if (x < scroller.scrollLeft) scroller.scrollLeft = x;
  const end = Math.min(N, state.token + 2) * CW; // what came next is seen as well
  if (end > scroller.scrollLeft + room) scroller.scrollLeft = end - room;
}
lensCanvas.addEventListener('keydown', keys);
lensCanvas.addEventListener('click', e => {
  const box = lensCanvas.getBoundingClientRect(), all = rows();
  const r = clamp(Math.floor((e.clientY - box.top) / rowHeight()), 0, all.length - 1), x = e.clientX - box.left - RAIL + scroller.scrollLeft;
  if (e.clientX - box.left < RAIL) go({layer: all[r]});
  else if (x >= 0 && x < T * CW) { const token = Math.floor(x / CW); go({layer: all[r], token, ...stepAt(token)}); }
});
lensCanvas.addEventListener('mousemove', e => {
  const box = lensCanvas.getBoundingClientRect(), all = rows(), s = all[clamp(Math.floor((e.clientY - box.top) / rowHeight()), 0, all.length - 1)];
  const t = Math.floor((e.clientX - box.left - RAIL + scroller.scrollLeft) / CW), at = s * T + t;
  lensCanvas.title = A.ranks && t >= 0 && t < T && A.ranks[at] >= 0 ? `${half(s)} · ${t} ${D.tokens[t].text}: ` +
    [0, 1, 2, 3, 4].map(k => `${piece(A.ids[at * 5 + k])} ${pct(A.probs[at * 5 + k] / 65535)}`).join('  ') +
    ' · ' + word('cell', {token: piece(D.answers[t]), rank: A.ranks[at] + 1, entropy: (A.entropy[at] / 2000).toFixed(1), kl: (A.kl[at] / 1000).toFixed(1)}) : '';
});
function find(text) {
  if (!text) return;
  const wanted = text.toLowerCase().replaceAll(' ', '·');
  for (let k = 1; k <= T; k++) {
    const i = (state.token + k) % T;
    if (D.tokens[i].text.toLowerCase().includes(wanted) || String(D.tokens[i].id) === text) { go({token: i, ...stepAt(i)}); reveal(); say(lensWords()); return; }
  }
  say(word('not_found'));
}
let focusBefore = null;
function help() {
  focusBefore = document.activeElement;
  put(overlay, h('header', {}, h('h2', {}, word('keys')), h('span', {class: 'aside'}, h('button', {onclick: closeOverlay}, word('close')))),
    h('table', {}, KEYS.map(([k, what]) => h('tr', {}, h('td', {class: 'mono'}, k), h('td', {class: 'piece'}, word('key_' + what))))), h('p', {}, word('keys_note')));
  overlay.dataset.kind = 'help'; overlay.hidden = false; overlay.focus();
}
function closeOverlay() {
  overlay.hidden = true;
  if (overlay.dataset.kind === 'head') go({head: null});
  (focusBefore && focusBefore.isConnected ? focusBefore : lensCanvas).focus();
}
document.addEventListener('keydown', e => {
  if (e.key === 'Escape' && !overlay.hidden) { e.preventDefault(); closeOverlay(); }
  else if (e.key === 'Escape' && state.layer !== NS - 1) go({layer: NS - 1}, true);
});
function theme() {
  const now = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  document.documentElement.dataset.theme = now;
  try { localStorage.setItem('tinyllm-theme', now); } catch { /* pages from files may have no storage */ }
  render();
}
function startTheme() {
  let kept = null;
  try { kept = localStorage.getItem('tinyllm-theme'); } catch { /* see above */ }
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  document.documentElement.dataset.theme = kept || (dark.matches ? 'dark' : 'light');
  dark.addEventListener('change', () => { document.documentElement.dataset.theme = dark.matches ? 'dark' : 'light'; render(); });
}

function render() {
  colours();
  says.textContent = D.steps[state.step].sentence;
  halvesButton.setAttribute('aria-pressed', String(state.halves));
  tokenButtons.forEach((b, i) => { b.setAttribute('aria-current', String(i === state.token)); b.tabIndex = i === state.token ? 0 : -1; });
  drawLens(); drawLensTable(); drawDetail(); drawFunnel(); drawWrites(); drawChoices(); drawOverview(); drawHead();
}
strip.addEventListener('keydown', e => {
  if (e.key !== 'ArrowLeft' && e.key !== 'ArrowRight') return;
  keys(e); tokenButtons[state.token].focus();
});
scroller.addEventListener('scroll', drawLens, {passive: true});
window.addEventListener('resize', render);
window.addEventListener('popstate', () => { readHash(); render(); });
window.addEventListener('hashchange', () => { readHash(); render(); });
startTheme(); buildStrip(); readHash(); render(); reveal();
Promise.all([['ids', 'lens-ids', Int32Array], ['probs', 'lens-probs', Uint16Array], ['ranks', 'lens-ranks', Int32Array], ['entropy', 'lens-entropy', Uint16Array],
  ['kl', 'lens-kl', Uint16Array], ['norms', 'norms', Float32Array], ['writes', 'writes', Float32Array], ['stages', 'stages', Float32Array], ['active', 'active', Uint16Array]]
  .map(async ([key, id, Type]) => { A[key] = await numbers(id, Type); })).then(() => { render(); document.documentElement.dataset.ready = 'yes'; });
})();
