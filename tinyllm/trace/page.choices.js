/* Who wrote the logit: a waterfall along the layers. */
function drawWrites() {
  const step = D.steps[state.step],
    W = clamp(writesBox.clientWidth, 280, 1200),
    H = 150,
    parts = step.parts;
  const sums = [0];
  parts.forEach(p => sums.push(sums.at(-1) + p));
  const low = Math.min(...sums),
    high = Math.max(...sums),
    y = v => 8 + ((high - v) / (high - low || 1)) * (H - 26),
    bw = (W - 46) / NS;
  const best = [...parts.keys()].sort((a, b) => Math.abs(parts[b]) - Math.abs(parts[a])).slice(0, 4);
  const svg = h('svg', {
    width: W,
    height: H,
    role: 'img',
    class: 'chart',
    tabindex: 0,
    onkeydown: keys,
    'aria-label': `${word('writes')}: ` + best.map(s => `${half(s)} ${parts[s].toFixed(2)}`).join(', '),
  });
  [low, 0, high].forEach(v => {
    if (v === 0 || v !== low || low < 0)
      svg.append(
        h('line', {x1: 34, x2: W, y1: y(v), y2: y(v), stroke: 'var(--line)'}),
        h('text', {x: 0, y: y(v) + 3}, v.toFixed(1)),
      );
  });
  parts.forEach((p, s) => {
    const x = 38 + s * bw,
      a = y(sums[s]),
      b = y(sums[s + 1]);
    svg.append(
      h(
        'rect',
        {
          x,
          width: Math.max(1, bw - 1),
          y: Math.min(a, b),
          height: Math.max(1, Math.abs(a - b)),
          fill: p >= 0 ? 'var(--up)' : 'var(--down)',
          'fill-opacity': s === state.layer ? 1 : 0.8,
          onclick: () => go({layer: s}),
          style: {cursor: 'pointer'},
        },
        h('title', {}, `${half(s)} ${p >= 0 ? '+' : ''}${p.toFixed(2)}`),
      ),
    );
    if ((s % 2 === 0 && layerOf(s) % Math.ceil(L / (W / 45)) === 0) || s === 0)
      svg.append(h('text', {x, y: H - 3}, s ? layerOf(s) : 'e'));
  });
  const used = [];
  best.forEach(s => {
    let at = Math.min(y(sums[s]), y(sums[s + 1])) - 3;
    while (used.some(([x0, y0]) => Math.abs(x0 - s) * bw < 80 && Math.abs(y0 - at) < 10)) at += 11;
    used.push([s, at]);
    const right = 38 + s * bw > W - 110;
    svg.append(
      h(
        'text',
        {
          x: right ? 38 + s * bw - 4 : 38 + s * bw,
          y: Math.max(9, at),
          'text-anchor': right ? 'end' : 'start',
          style: {fill: 'var(--ink)'},
        },
        `${half(s)} ${parts[s] >= 0 ? '+' : ''}${parts[s].toFixed(1)}`,
      ),
    );
  });
  put(
    writesBox,
    h(
      'header',
      {class: 'bar-top'},
      h('h2', {}, word('writes')),
      h('span', {class: 'crumb'}, word(step.centred ? 'over_mean' : 'uncentred', {token: piece(step.token)})),
      tag(word('derived')),
    ),
    svg,
    h('div', {class: 'facts2'}, step.check, h('span', {}, word('not_cause'))),
    h(
      'details',
      {},
      h('summary', {}, word('table')),
      h(
        'div',
        {class: 'tablebox'},
        h(
          'table',
          {},
          h(
            'tr',
            {},
            [word('layer'), 'attn', 'ffn', word('sum_so_far')].map(x => h('th', {}, x)),
          ),
          h(
            'tr',
            {},
            h('td', {}, 'embed'),
            h('td', {}, parts[0].toFixed(3)),
            h('td', {}),
            h('td', {}, sums[1].toFixed(2)),
          ),
          [...Array(L).keys()].map(l =>
            h(
              'tr',
              {},
              h('td', {}, l),
              h('td', {}, parts[2 * l + 1].toFixed(3)),
              h('td', {}, parts[2 * l + 2].toFixed(3)),
              h('td', {}, sums[2 * l + 3].toFixed(2)),
            ),
          ),
        ),
      ),
    ),
  );
}

/* Generated tokens, each with its alternatives. */
function drawChoices() {
  const step = D.steps[state.step];
  if (!step.alternatives) {
    put(choicesBox, h('h2', {}, word('choices')), h('p', {}, word('none_generated')));
    return;
  }
  const rest = 1 - step.alternatives.reduce((a, [, p]) => a + p, 0);
  const place = step.alternatives.findIndex(([id]) => id === step.token);
  put(
    choicesBox,
    h('header', {class: 'bar-top'}, h('h2', {}, word('choices')), tag(word('measured'))),
    h(
      'div',
      {class: 'pills'},
      D.steps.map((s, i) => {
        const pill = h(
          'button',
          {
            class: 'pill',
            dir: 'auto',
            'aria-pressed': String(i === state.step),
            onclick: () => go({step: i, token: s.position}),
          },
          piece(s.token),
          h('small', {}, pct(s.probability)),
        );
        pill.style.borderBottomColor = `rgba(var(--surprise), ${clamp(-Math.log2(s.probability) / 6, 0.05, 1)})`;
        return pill;
      }),
    ),
    h('h3', {}, word(place > 0 ? 'instead_number' : 'instead', {token: piece(step.token), n: place + 1})),
    step.alternatives.map(([id, p]) => bar(piece(id), p, pct(p), id === step.token ? 'won' : '')),
    bar(word('rest'), Math.max(0, rest), pct(Math.max(0, rest)), 'gone-not'),
  );
}
