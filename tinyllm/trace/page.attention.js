/* Attention. */
const present = D.attention.map((a, i) => (a ? i : -1)).filter(i => i >= 0);
const headsBefore = l => present.filter(i => i < l).reduce((n, i) => n + D.attention[i].heads, 0);

async function drawThumbs(holder, att, l) {
  const thumbs = await numbers('thumbs', Uint8Array);
  if (!thumbs || !holder.isConnected) return;
  const n = Math.min(32, T),
    group = att.heads / att.kv;
  for (let g = 0; g < att.kv; g++) {
    const cells = [];
    for (let k = g * group; k < (g + 1) * group; k++) {
      if (D.shown_heads && !D.shown_heads.includes(k)) continue;
      const canvas = h('canvas', {'aria-hidden': 'true'});
      canvas.width = canvas.height = n;
      paintSquare(canvas, n, (r, c) => (c > r ? -1 : thumbs[((headsBefore(l) + k) * n + r) * n + c] / 15));
      const words = ['entropy', 'sink']
        .filter(x => att[x])
        .map(x => `${statistic(x)} ${att[x][k].toFixed(2)}`)
        .join(', ');
      cells.push(
        h(
          'button',
          {
            class: 'thumb',
            'aria-pressed': String(state.head === k),
            title: words,
            'aria-label': `${word('head', {n: k})}: ${words}`,
            onclick: () => go({head: k}),
          },
          canvas,
          word('head', {n: k}),
        ),
      );
    }
    if (cells.length) holder.append(h('div', {class: 'kv'}, word('kv', {n: g}), h('div', {}, cells)));
  }
}

/* value(r, c) in 0..1, or below 0 for cells that do not exist, which stay see-through. */
function paintSquare(canvas, n, value) {
  const ctx = canvas.getContext('2d'),
    image = ctx.createImageData(n, n);
  for (let r = 0; r < n; r++)
    for (let c = 0; c < n; c++) {
      const v = value(r, c),
        at = (r * n + c) * 4;
      if (v < 0) continue;
      const [red, green, blue] = ramp(v);
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = 255;
    }
  ctx.putImageData(image, 0, 0);
}

/* Readers of one layer's maps: probabilities of a head's row, or null where none is stored. */
async function mapOf(l) {
  const codes = await numbers(`attn-${l}`, Uint8Array),
    att = D.attention[l],
    bits = D.coding.bits,
    top = 2 ** bits - 1;
  const fine = await Promise.all(D.steps.map((s, i) => numbers(`row-${i}`, Uint8Array)));
  const values = await numbers('value-norms', Uint16Array);
  const kept = T - att.first,
    q0 = att.first + (D.coding.last_queries ? Math.max(0, kept - D.coding.last_queries) : 0);
  const before = q => (q * (q + 1) - q0 * (q0 + 1)) / 2,
    perHead = before(T);
  const raw = (head, q) => {
    const i = D.steps.findIndex(s => s.position === q),
      row = new Float32Array(q + 1);
    if (i >= 0 && fine[i]) {
      const at = (headsBefore(l) + head) * (q + 1);
      for (let c = 0; c <= q; c++) row[c] = (fine[i][at + c] / 255) ** 2;
      return row;
    }
    if (!codes || q < q0) return null;
    const at = head * perHead + before(q);
    for (let c = 0; c <= q; c++) {
      const k = at + c,
        code = bits > 4 ? codes[k] : k & 1 ? codes[k >> 1] >> 4 : codes[k >> 1] & 15;
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
  const run = ++headRun,
    att = attentionOf(state.layer);
  if (state.head === null || !att) {
    if (overlay.dataset.kind === 'head') overlay.hidden = true;
    return;
  }
  const l = layerOf(state.layer),
    head = state.head,
    map = await mapOf(l);
  if (run !== headRun) return;
  const q = state.token,
    row = map.shown(head, q, state.mode);
  const room = Math.min(640, window.innerWidth - 60),
    size = T > room ? room : Math.floor(room / T) * T;
  const canvas = h('canvas', {
    class: 'chart',
    tabindex: 0,
    role: 'img',
    onkeydown: keys,
    onclick: e => {
      const box = canvas.getBoundingClientRect();
      go({token: clamp(Math.floor(((e.clientY - box.top) / box.height) * T), 0, T - 1)}, true);
    },
  });
  const modes = h(
    'span',
    {class: 'aside'},
    ['raw', 'apart', 'value'].map(
      m =>
        (m !== 'value' || map.hasValues) &&
        h('button', {'aria-pressed': String(state.mode === m), onclick: () => go({mode: m}, true)}, word(m)),
    ),
    h('button', {onclick: () => go({head: null})}, word('close')),
  );
  const share = map.raw(head, q),
    sink = share ? D.sinks.filter(c => c <= q).reduce((a, c) => a + share[c], 0) : 0;
  const best = row ? [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 5) : [];
  const words = row ? best.map(c => `${c} ${D.tokens[c].text} ${pct(row[c])}`).join(', ') : word('no_row');
  put(
    overlay,
    h(
      'header',
      {},
      h('h2', {}, word('head_title', {l, h: head, g: Math.floor(head / (att.heads / att.kv))})),
      tag(word('derived')),
      modes,
    ),
    h(
      'div',
      {class: 'headgrid'},
      h(
        'div',
        {},
        map.hasMap ? canvas : word('no_map'),
        h(
          'div',
          {class: 'legend'},
          '√p: 0',
          h('i'),
          '1',
          h('span', {}, ' ' + word(state.mode === 'apart' ? 'hatched_sinks' : 'hatched')),
        ),
      ),
      h(
        'div',
        {},
        h('h3', {}, word('query', {i: q, token: D.tokens[q].text})),
        best.map(c => bar(`${c} ${D.tokens[c].text}`, row[c], pct(row[c]))),
        h(
          'div',
          {class: 'facts2'},
          word('sinks', {p: pct(sink)}),
          att.window ? h('span', {}, word('window', {n: att.window})) : null,
          STATISTICS.map(k => att[k] && h('span', {}, `${statistic(k)} ${att[k][head].toFixed(2)}`)),
        ),
        h('h3', {}, word('on_text')),
        h(
          'div',
          {class: 'painted mono'},
          D.tokens.slice(0, T).map((t, c) => {
            const visible = c <= q && (!att.window || c > q - att.window);
            const style = {};
            if (row && visible) {
              const x = ramp(Math.sqrt(row[c]));
              style.background = css(x);
              style.color = textOn(x);
            }
            return h(
              'span',
              {
                style,
                dir: 'auto',
                class: c === q ? 'query' : visible ? '' : 'absent',
                title: row && visible ? pct(row[c]) : '',
              },
              t.text,
              '\u200b',
            );
          }),
        ),
      ),
    ),
  );
  canvas.setAttribute('aria-label', word('head_words', {l, h: head, i: q, words}));
  overlay.dataset.kind = 'head';
  if (overlay.hidden) {
    overlay.hidden = false;
    overlay.focus();
  }
  if (map.hasMap) paintHead(canvas, map, head, att, size);
  if (document.activeElement === overlay || document.activeElement === document.body)
    canvas.focus({preventScroll: true});
  say(words);
}

function paintHead(canvas, map, head, att, size) {
  const ctx = sized(canvas, size, size),
    small = document.createElement('canvas'),
    q = state.token;
  small.width = small.height = T;
  const all = [...Array(T).keys()].map(r => map.shown(head, r, state.mode));
  paintSquare(small, T, (r, c) =>
    c > r || (att.window && c <= r - att.window) || !all[r] || (state.mode === 'apart' && D.sinks.includes(c))
      ? -1
      : Math.sqrt(all[r][c]),
  );
  hatch(ctx, 0, 0, size, size);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(small, 0, 0, size, size);
  const cell = size / T;
  ctx.strokeStyle = palette.pick;
  ctx.lineWidth = 1.5;
  ctx.strokeRect(0, q * cell, (q + 1) * cell, Math.max(2, cell));
  ctx.strokeStyle = palette.line;
  ctx.strokeRect(0, 0, size, size);
}

function drawOverview() {
  const stats = STATISTICS.filter(k => present.some(l => D.attention[l][k]));
  if (!stats.length) {
    overviewBox.closest('section').hidden = true;
    return;
  }
  const k = state.stat,
    most = Math.max(...present.flatMap(l => D.attention[l][k] || [0]), 1e-9),
    top = k === 'distance' ? most : 1;
  const widest = Math.max(...present.map(l => D.attention[l].heads));
  const cw = clamp(Math.floor(Math.min(1200, window.innerWidth - 90) / present.length), 9, 34),
    rh = 15;
  const canvas = h('canvas', {
    class: 'chart',
    tabindex: 0,
    role: 'img',
    'aria-label': `${word('overview')}: ${word('overview_words', {what: statistic(k), n: present.length, m: widest})}`,
    onkeydown: keys,
    onclick: e => {
      const box = canvas.getBoundingClientRect(),
        x = Math.floor((e.clientX - box.left - 28) / cw),
        y = Math.floor((e.clientY - box.top) / rh);
      if (x >= 0 && x < present.length && y >= 0 && y < D.attention[present[x]].heads)
        go({layer: 2 * present[x] + 2, head: y});
    },
  });
  put(
    overviewBox,
    h(
      'header',
      {class: 'bar-top'},
      h('h2', {}, word('overview')),
      stats.map(x =>
        h(
          'button',
          {
            'aria-pressed': String(x === k),
            onclick: () => {
              state.stat = x;
              drawOverview();
            },
          },
          statistic(x),
        ),
      ),
      h('span', {class: 'legend'}, '0', h('i'), top === 1 ? '1' : sig(top)),
      h('span', {class: 'crumb'}, word('overview_note')),
    ),
    h('div', {class: 'tablebox'}, canvas),
  );
  const ctx = sized(canvas, 28 + present.length * cw + 2, widest * rh + 16);
  ctx.font = '9px system-ui, sans-serif';
  ctx.textBaseline = 'middle';
  present.forEach((l, i) => {
    const att = D.attention[l];
    for (let head = 0; head < att.heads; head++) {
      const gap = head % (att.heads / att.kv) === 0 ? 1 : 0;
      ctx.fillStyle = css(ramp((att[k] ? att[k][head] : 0) / top));
      ctx.fillRect(28 + i * cw, head * rh + gap, cw - 1, rh - 1 - gap);
      if (!i) {
        ctx.fillStyle = palette.soft;
        ctx.fillText(head, 4, head * rh + rh / 2);
      }
    }
    ctx.fillStyle = att.window ? palette.ffn : palette.soft;
    if (i % Math.ceil(18 / cw) === 0) ctx.fillText((att.window ? 'w' : '') + l, 29 + i * cw, widest * rh + 8);
    if (l === layerOf(state.layer)) {
      ctx.strokeStyle = palette.pick;
      ctx.strokeRect(27.5 + i * cw, 0.5, cw, widest * rh);
    }
  });
}
