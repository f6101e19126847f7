/* Token strip: the x axis of the page. */
const tokenButtons = [];

function buildStrip() {
  put(
    strip,
    h(
      'div',
      {class: 'rail', style: {width: RAIL + 'px'}},
      h('span', {style: {width: '36px'}}, word('layer')),
      h('span', {style: {width: '46px'}}, '|h|'),
      h('span', {}, '+attn +ffn'),
    ),
  );
  D.tokens.forEach((t, i) => {
    const bits = t.bits === null ? '' : word('surprise', {n: t.bits.toFixed(1)});
    const label =
      word('token', {i, token: t.text, id: t.id, bytes: t.hex}) +
      bits +
      (D.sinks.includes(i) ? ', ' + word('is_sink') : '');
    const classes = [
      'tok',
      t.kind,
      D.sinks.includes(i) && 'sink',
      i === D.n_prompt && 'first',
      t.group !== null && i > 0 && D.tokens[i - 1].group === t.group && 'joined',
    ]
      .filter(Boolean)
      .join(' ');
    const button = h(
      'button',
      {
        class: classes,
        title: label,
        'aria-label': label,
        tabindex: -1,
        onclick: () => (i < T ? go({token: i, ...stepAt(i)}) : go({step: i - D.n_prompt, token: i - 1})),
      },
      h('small', {}, i),
      h('b', {dir: 'auto'}, t.text),
      h('small', {}, t.group === null ? t.id : t.hex),
    );
    if (t.bits > 7) button.classList.add('hot');
    if (t.bits !== null) button.style.backgroundColor = `rgba(var(--surprise), ${clamp(t.bits / 14, 0, 1) * 0.75})`;
    tokenButtons.push(button);
    strip.append(button);
  });
}
const stepAt = token => {
  const i = D.steps.findIndex(s => s.position === token);
  return i >= 0 ? {step: i} : {};
};

/* Lens grid. Only what is in view is drawn. */
const rows = () =>
  state.halves ? [...Array(NS).keys()].reverse() : [...Array(L + 1).keys()].map(l => l * 2).reverse();
const rowHeight = () => clamp(Math.floor(416 / rows().length), state.halves ? 12 : 13, 24);

function drawLens() {
  const all = rows(),
    rh = rowHeight(),
    w = scroller.clientWidth,
    hgt = all.length * rh + 2;
  const ctx = sized(lensCanvas, w, hgt),
    off = scroller.scrollLeft;
  lensHolder.style.width = w + 'px';
  const font = `${clamp(rh - 3, 9, 12)}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace`;
  ctx.font = font;
  ctx.textBaseline = 'middle';
  const first = Math.max(0, Math.floor(off / CW)),
    last = Math.min(T - 1, Math.ceil((off + w - RAIL) / CW));
  const scale = Math.log(D.n_vocab);
  ctx.save();
  ctx.beginPath();
  ctx.rect(RAIL, 0, w - RAIL, hgt);
  ctx.clip();
  if (A.ranks)
    for (let r = 0; r < all.length; r++)
      for (let t = first; t <= last; t++) {
        const s = all[r],
          at = s * T + t,
          x = RAIL + t * CW - off,
          y = r * rh + 1;
        if (A.ranks[at] < 0) {
          hatch(ctx, x, y, CW - 1, rh - 1);
          continue;
        }
        // Tied embeddings predict their own token before the first layer: no news, so that row is grey.
        const c = ramp(1 - Math.log(A.ranks[at] + 1) / scale),
          grey = s === 0 && D.tied;
        ctx.fillStyle = grey ? palette.bg : css(c);
        ctx.fillRect(x, y, CW - 1, rh - 1);
        ctx.fillStyle = grey ? palette.soft : textOn(c);
        ctx.font = A.ranks[at] === 0 ? 'bold ' + font : font;
        ctx.fillText(fitted(ctx, piece(A.ids[at * 5]), CW - 6), x + 3, y + rh / 2);
      }
  const row = all.indexOf(state.layer),
    x = RAIL + state.token * CW - off;
  ctx.strokeStyle = palette.pick;
  ctx.lineWidth = 1;
  ctx.globalAlpha = 0.45;
  ctx.strokeRect(x - 0.5, 0.5, CW, hgt - 1);
  if (row >= 0) ctx.strokeRect(RAIL - off, row * rh + 0.5, T * CW, rh);
  ctx.globalAlpha = 1;
  ctx.lineWidth = 2;
  if (row >= 0) ctx.strokeRect(x, row * rh + 1, CW - 1, rh - 1);
  ctx.restore();
  drawRail(ctx, all, rh);
  lensCanvas.setAttribute('aria-label', `${word('lens')}: ${word('rows', {n: all.length, m: T})}. ` + lensWords());
}

function drawRail(ctx, all, rh) {
  ctx.font = '10px system-ui, sans-serif';
  ctx.textBaseline = 'middle';
  const t = state.token;
  let low = Infinity,
    high = 0,
    most = 1e-9;
  if (A.norms)
    for (let s = 0; s < NS; s++) {
      const v = Math.max(1e-6, A.norms[s * T + t]);
      low = Math.min(low, v);
      high = Math.max(high, v);
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
      const width = (22 * A.writes[(state_ - 1) * T + t]) / most;
      ctx.fillStyle = colour;
      ctx.fillRect(x, y - rh / 4, Math.max(1, width), Math.max(2, rh / 2));
    };
    if (!state.halves || s % 2) bar(s % 2 ? s : s - 1, 84, palette.attn);
    if (s % 2 === 0) bar(s, 108, palette.ffn);
  });
  ctx.strokeStyle = palette.soft;
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  points.forEach(([x, y], i) => (i ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
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
  const where = word('at_token', {
    state: state.layer === 0 ? word('embedding') : half(state.layer),
    i: state.token,
    token: D.tokens[state.token].text,
  });
  if (!A.ranks || A.ranks[at] < 0) return `${where}: ${word('not_read')}`;
  return (
    `${where}: ` +
    word('lens_words', {
      token: piece(A.ids[at * 5]),
      p: pct(A.probs[at * 5] / 65535),
      answer: piece(D.answers[state.token]),
      rank: A.ranks[at] + 1,
    })
  );
}

function drawLensTable() {
  if (lensTable.hidden || !A.ranks) return;
  const t = state.token,
    names = ['layer', 'first', null, 'second', null, 'rank_of_answer', 'entropy_bits', 'kl_bits'];
  put(
    lensTable,
    h(
      'table',
      {},
      h(
        'tr',
        {},
        names.map(x => h('th', {}, x ? word(x) : 'p')),
      ),
      rows().map(s => {
        const at = s * T + t;
        return A.ranks[at] < 0
          ? null
          : h(
              'tr',
              {},
              h('td', {}, s ? half(s) : 'embed'),
              h('td', {class: 'piece'}, piece(A.ids[at * 5])),
              h('td', {}, pct(A.probs[at * 5] / 65535)),
              h('td', {class: 'piece'}, piece(A.ids[at * 5 + 1])),
              h('td', {}, pct(A.probs[at * 5 + 1] / 65535)),
              h('td', {}, A.ranks[at] + 1),
              h('td', {}, (A.entropy[at] / 2000).toFixed(2)),
              h('td', {}, (A.kl[at] / 1000).toFixed(2)),
            );
      }),
    ),
  );
}

function bar(name, share, number, extra, title) {
  return h(
    'div',
    {class: 'bar ' + (extra || ''), title: title || name},
    h('span', {class: 'name', dir: 'auto'}, name),
    h('span', {class: 'track'}, h('div', {class: 'fill', style: {width: clamp(share, 0, 1) * 100 + '%'}})),
    h('span', {class: 'num'}, number),
  );
}
