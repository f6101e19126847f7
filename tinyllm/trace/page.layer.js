/* The selected layer at the selected token. */
let detailRun = 0;

async function drawDetail() {
  const run = ++detailRun,
    t = state.token,
    s = state.layer,
    l = layerOf(s),
    at = s * T + t,
    kids = [];
  const behind = D.tokens[t + 1];
  kids.push(
    h(
      'header',
      {},
      h(
        'h2',
        {},
        s === 0
          ? word('embedding')
          : s % 2
            ? word('behind_attention', {layer: word('layer_n', {n: l})})
            : word('layer_n', {n: l}),
      ),
      h('span', {class: 'crumb'}, word('crumb', {step: state.step + 1, i: t, token: D.tokens[t].text})),
    ),
  );
  kids.push(
    h(
      'div',
      {class: 'facts2'},
      word('id', D.tokens[t]),
      h('span', {}, word('bytes', {bytes: D.tokens[t].hex})),
      D.sinks.includes(t) && h('span', {}, word('is_sink')),
      behind && h('span', {}, word('predicts', {i: t + 1, token: behind.text})),
    ),
  );
  if (A.ranks) {
    kids.push(h('h3', {}, word('would_say') + ' ', tag(word('derived'))));
    if (A.ranks[at] < 0) kids.push(word('not_read'));
    else {
      for (let k = 0; k < 5; k++) {
        const p = A.probs[at * 5 + k] / 65535,
          id = A.ids[at * 5 + k];
        kids.push(bar(piece(id), p, pct(p), id === D.answers[t] ? 'won' : ''));
      }
      kids.push(
        h(
          'div',
          {class: 'facts2'},
          word('answer_rank', {token: piece(D.answers[t]), rank: A.ranks[at] + 1}),
          h('span', {}, word('entropy', {n: (A.entropy[at] / 2000).toFixed(2)})),
          h('span', {}, word('kl', {n: (A.kl[at] / 1000).toFixed(2)})),
        ),
      );
    }
  }
  const step = D.steps.find(x => x.position === t);
  if (step && step.leaders) kids.push(h('h3', {}, word('curve')), rankCurve(step));
  const att = attentionOf(s);
  const heads = h('div', {class: 'heads'});
  if (att) {
    const local = att.window ? word('sees_last', {n: att.window}) : '';
    kids.push(
      h('h3', {}, word('heads', {n: att.heads, kv: att.kv}) + local + ' ', tag(word('derived'))),
      looksWords(step, l),
      heads,
    );
  }
  if (step && step.neurons[l]) kids.push(h('h3', {}, word('neurons'), ' ', tag(word('measured'))), neurons(step, l));
  else if (A.active && D.shapes.active.includes(l)) {
    kids.push(
      h('div', {class: 'facts2'}, word('active_above', {p: pct(A.active[D.shapes.active.indexOf(l) * T + t] / 65535)})),
    );
  }
  const router = D.shapes.routers[l];
  if (router) kids.push(h('h3', {}, word('experts'), ' ', tag(word('measured'))), await experts(l, router, t));
  if (s === 0 && D.tokens[t].near.length) {
    kids.push(
      h('h3', {}, word('nearest')),
      D.tokens[t].near.map(([id, c]) => bar(piece(id), c, c.toFixed(2))),
    );
  }
  if (A.stages) kids.push(stageTable(l, t));
  if (run !== detailRun) return;
  put(detail, kids);
  if (att) drawThumbs(heads, att, l);
}

function looksWords(step, l) {
  if (!step || !step.looks[l] || !step.looks[l].length) return null;
  return h(
    'div',
    {class: 'facts2'},
    word('looks_at', {
      list: step.looks[l]
        .slice(0, 3)
        .map(([t, p]) => `${t} ${D.tokens[t].text} ${pct(p)}`)
        .join(', '),
    }),
  );
}

function rankCurve(step) {
  const W = 340,
    H = 96,
    marks = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#7a7a7a', '#a09000'];
  const order = step.leaders.ids
    .map((id, i) => i)
    .sort((a, b) => step.leaders.ranks[a][NS - 1] - step.leaders.ranks[b][NS - 1])
    .slice(0, 8);
  const top = Math.log(D.n_vocab),
    x = s => 4 + (s / (NS - 1)) * (W - 84),
    y = r => 6 + (Math.log(r + 1) / top) * (H - 14);
  const svg = h('svg', {
    width: '100%',
    viewBox: `0 0 ${W} ${H}`,
    role: 'img',
    'aria-label':
      word('curve') +
      ': ' +
      order
        .map(i => word('ends_at', {token: piece(step.leaders.ids[i]), rank: step.leaders.ranks[i][NS - 1] + 1}))
        .join(', '),
  });
  svg.append(
    h('line', {x1: x(state.layer), x2: x(state.layer), y1: 0, y2: H, stroke: 'currentColor', 'stroke-opacity': 0.3}),
  );
  const used = [];
  order.forEach((i, k) => {
    const ranks = step.leaders.ranks[i];
    svg.append(
      h('path', {
        d: ranks.map((r, s) => `${s ? 'L' : 'M'}${x(s).toFixed(1)} ${y(r).toFixed(1)}`).join(''),
        fill: 'none',
        stroke: marks[k],
        'stroke-width': step.leaders.ids[i] === step.token ? 2.4 : 1.2,
        'stroke-dasharray': k > 3 ? '3 2' : null,
      }),
    );
    let at = y(ranks[NS - 1]) + 3;
    while (used.some(u => Math.abs(u - at) < 10)) at += 5;
    if (at < H + 4) {
      used.push(at);
      svg.append(
        h('text', {x: W - 76, y: Math.min(at, H - 2), style: {fill: marks[k]}}, fit(piece(step.leaders.ids[i]), 12)),
      );
    }
  });
  return svg;
}
const fit = (text, n) => ([...text].length > n ? [...text].slice(0, n - 1).join('') + '…' : text);

function neurons(step, l) {
  const c = step.carriers[l];
  return [
    h(
      'div',
      {class: 'facts2'},
      A.active && word('active', {p: pct(A.active[D.shapes.active.indexOf(l) * T + step.position] / 65535)}),
      c && c[0] > 0 && h('span', {}, word('carriers', {a: c[0], b: c[1]})),
    ),
    h(
      'div',
      {class: 'tablebox'},
      h(
        'table',
        {},
        h(
          'tr',
          {},
          ['neuron', 'activation', 'promotes'].map((x, i) => h('th', {class: i > 1 && 'piece'}, word(x))),
        ),
        step.neurons[l].map(n =>
          h(
            'tr',
            {title: word('suppresses', {list: n[4].map(piece).join(' ')})},
            h('td', {}, n[0]),
            h('td', {}, sig(n[1])),
            h('td', {class: 'piece'}, n[3].map(id => fit(piece(id), 11)).join('  ')),
          ),
        ),
      ),
    ),
  ];
}

async function experts(l, router, t) {
  const probs = await numbers(`router-${l}`, Uint16Array),
    [n, ids, weights] = router;
  const shown = [...Array(n).keys()]
    .sort((a, b) => probs[t * n + b] - probs[t * n + a])
    .slice(0, Math.max(8, ids[t].length));
  return shown.map(e => {
    const k = ids[t].indexOf(e),
      p = probs[t * n + e] / 65535;
    return bar(
      word('expert', {n: e}),
      p,
      pct(p),
      k >= 0 ? 'won' : '',
      k >= 0 ? word('chosen_weight', {w: sig(weights[t][k])}) : word('not_chosen'),
    );
  });
}

function stageTable(l, t) {
  const body = [];
  D.shapes.stages.forEach(([stage, layer, width, ms, histogram], i) => {
    if (layer !== (l < 0 ? null : l)) return;
    const [n, lo, hi] = [0, 1, 2].map(k => A.stages[(i * 3 + k) * T + t]),
      most = Math.max(...histogram);
    body.push(
      h(
        'tr',
        {},
        h('td', {}, stage),
        h('td', {}, width),
        h('td', {}, sig(n)),
        h('td', {}, sig(lo)),
        h('td', {}, sig(hi)),
        h(
          'td',
          {},
          h(
            'svg',
            {width: 48, height: 12, 'aria-hidden': 'true'},
            histogram.map((v, k) =>
              h('rect', {x: k * 3, width: 2, y: 12 - (12 * v) / most, height: (12 * v) / most, fill: 'currentColor'}),
            ),
          ),
        ),
        h('td', {}, ms),
      ),
    );
  });
  return h(
    'details',
    {},
    h('summary', {}, word('stages'), ' ', tag(word('measured'))),
    h(
      'div',
      {class: 'tablebox'},
      h(
        'table',
        {},
        h(
          'tr',
          {},
          ['stage', 'width', 'norm', 'min', 'max', 'last_token', null].map(x => h('th', {}, x ? word(x) : 'ms')),
        ),
        body,
      ),
    ),
  );
}
