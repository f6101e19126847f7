/* Sampling: what happened, and what would happen with other settings. */
const NAMES = {
  top_k: 'top-k',
  top_p: 'top-p',
  min_p: 'min-p',
  typ_p: 'typical',
  temperature: word('temperature'),
  penalties: word('penalties'),
};
const knobs = {...D.params};

function drawFunnel() {
  const step = D.steps[state.step],
    kids = [];
  const changed = Object.keys(knobs).some(k => knobs[k] !== D.params[k]);
  kids.push(
    h(
      'header',
      {class: 'bar-top'},
      h('h2', {}, word('funnel')),
      h(
        'span',
        {class: 'crumb'},
        word('step_chosen', {
          step: state.step + 1,
          i: step.position,
          token: D.tokens[step.position].text,
          chosen: piece(step.token),
        }),
      ),
      tag(word(changed ? 'recomputed' : step.funnel ? 'measured' : 'derived')),
    ),
  );
  kids.push(h('div', {class: 'funnel'}, changed || !step.funnel ? recomputed(step) : happened(step)));
  const slider = (key, name, min, max, by) => {
    const out = h('output', {}, knobs[key]);
    return h(
      'label',
      {},
      name,
      h('input', {
        type: 'range',
        min,
        max,
        step: by,
        value: knobs[key],
        oninput: e => {
          knobs[key] = +e.target.value;
          out.textContent = knobs[key];
          put(kids.at(-2), recomputed(step));
        },
        onchange: drawFunnel,
      }),
      out,
    );
  };
  kids.push(
    h(
      'div',
      {class: 'sliders'},
      h('b', {}, word('what_if')),
      slider('temperature', word('temperature'), 0, 2, 0.05),
      slider('top_k', 'top-k', 0, 100, 1),
      slider('top_p', 'top-p', 0, 1, 0.01),
      slider('min_p', 'min-p', 0, 0.5, 0.01),
      changed &&
        h(
          'button',
          {
            onclick: () => {
              Object.assign(knobs, D.params);
              drawFunnel();
            },
          },
          word('reset'),
        ),
    ),
  );
  put(funnelBox, kids);
}
const N_SHOWN = 8;
const keeps = (a, b, kept) =>
  a < b ? word('keeps', {a, b: b.toLocaleString('en'), p: pct(kept)}) : word('candidates', {n: a.toLocaleString('en')});

function happened(step) {
  const f = step.funnel,
    columns = f.stages.map(stage => {
      const left = keeps(stage.after, stage.before, stage.kept);
      return h(
        'div',
        {class: 'stage'},
        h('h3', {}, NAMES[stage.stage] || stage.stage, stage.setting === null ? '' : ` ${stage.setting}`),
        h('div', {class: 'facts2'}, left),
        stage.candidates
          .slice(0, N_SHOWN)
          .map(c =>
            bar(
              c.token,
              stage.stage === 'temperature' ? c.after : c.before,
              pct(stage.stage === 'temperature' ? c.after : c.before),
              (c.after === 0 ? 'gone ' : '') + (c.id === f.draw.token ? 'won' : ''),
              `${c.token}: ${pct(c.before)} → ${pct(c.after)}`,
            ),
          ),
      );
    });
  if (f.draw.u === null)
    return [
      ...columns,
      h(
        'div',
        {class: 'stage'},
        h('h3', {}, word('most_probable')),
        step.alternatives.slice(0, N_SHOWN).map(([id, p]) => bar(piece(id), p, pct(p), id === step.token ? 'won' : '')),
      ),
    ];
  return [
    ...columns,
    drawColumn(
      f.draw.candidates.map(c => [c.id, c.probability]),
      f.draw,
    ),
  ];
}

function drawColumn(candidates, draw) {
  const W = 150,
    H = 170,
    svg = h('svg', {
      width: W,
      height: H,
      role: 'img',
      'aria-label': word('falls_on', {u: draw.u.toFixed(3), token: piece(draw.token)}),
    });
  let from = 0;
  candidates.forEach(([id, p], i) => {
    svg.append(
      h(
        'rect',
        {
          x: 22,
          width: 26,
          y: from * (H - 4) + 2,
          height: Math.max(0.5, p * (H - 4) - 0.5),
          fill: id === draw.token ? 'var(--ffn)' : i % 2 ? 'var(--c2)' : 'var(--c1)',
          stroke: 'var(--line)',
        },
        h('title', {}, `${piece(id)} ${pct(p)}`),
      ),
    );
    if (p > 0.06) svg.append(h('text', {x: 54, y: (from + p / 2) * (H - 4) + 5}, fit(`${piece(id)} ${pct(p)}`, 15)));
    from += p;
  });
  const y = draw.u * (H - 4) + 2;
  svg.append(
    h('path', {d: `M4 ${y - 5}L20 ${y}L4 ${y + 5}Z`, fill: 'var(--pick)'}),
    h('line', {x1: 18, x2: 50, y1: y, y2: y, stroke: 'var(--pick)', 'stroke-width': 1.5}),
  );
  const range = {u: draw.u.toFixed(3), a: draw.below.toFixed(3), b: (draw.below + draw.probability).toFixed(3)};
  return h('div', {class: 'stage'}, h('h3', {}, word('draw')), h('div', {class: 'facts2'}, word('u_in', range)), svg);
}

function recomputed(step) {
  const w = step.what_if,
    columns = [];
  let list = w.ids.map((id, i) => ({id, x: w.logits[i]}));
  const top = list[0].x;
  const rest = w.bins.reduce(
    (sum, n, i) => sum + n * Math.exp(w.low + ((i + 0.5) * (w.high - w.low)) / w.bins.length - top),
    0,
  );
  let other = rest,
    n = D.n_vocab;
  const probs = () => {
    const e = list.map(c => Math.exp(c.x - list[0].x)),
      sum = e.reduce((a, b) => a + b, 0) + other;
    return e.map(v => v / sum);
  };
  const stage = (name, keep) => {
    const p = probs(),
      count = keep(p),
      was = n;
    const kept =
      p.slice(0, count).reduce((a, b) => a + b, 0) +
      (count >= list.length && n > list.length ? 1 - p.reduce((a, b) => a + b, 0) : 0);
    if (count < list.length || count < n) {
      if (count <= list.length) {
        other = 0;
        n = count;
      }
    }
    columns.push(
      h(
        'div',
        {class: 'stage'},
        h('h3', {}, name),
        h('div', {class: 'facts2'}, keeps(n, was, kept)),
        list
          .slice(0, N_SHOWN)
          .map((c, i) =>
            bar(piece(c.id), p[i], pct(p[i]), (i >= count ? 'gone ' : '') + (c.id === step.token ? 'won' : '')),
          ),
      ),
    );
    list = list.slice(0, Math.max(1, count));
  };
  const all = () => (n > list.length ? Infinity : list.length);
  if (knobs.temperature > 0) {
    if (knobs.top_k > 0) stage(`top-k ${knobs.top_k}`, () => knobs.top_k);
    if (knobs.top_p < 1)
      stage(`top-p ${knobs.top_p}`, p => {
        let sum = 0;
        const i = p.findIndex(v => (sum += v) >= knobs.top_p);
        return i < 0 ? all() : i + 1;
      });
    if (knobs.min_p > 0)
      stage(`min-p ${knobs.min_p}`, p => {
        const i = p.findIndex(v => v < knobs.min_p * p[0]);
        return i < 0 ? all() : i;
      });
    list = list.map(c => ({id: c.id, x: c.x / knobs.temperature}));
    if (other)
      other = w.bins.reduce(
        (sum, k, i) =>
          sum + k * Math.exp((w.low + ((i + 0.5) * (w.high - w.low)) / w.bins.length - top) / knobs.temperature),
        0,
      );
    stage(`${word('temperature')} ${knobs.temperature}`, all);
  } else stage(word('greedy'), () => 1);
  const u = step.funnel && step.funnel.draw.u,
    p = probs();
  if (u !== null && u !== undefined && knobs.temperature > 0) {
    let sum = 0,
      i = p.findIndex(v => (sum += v) > u);
    if (i < 0) i = p.length - 1;
    const below = p.slice(0, i).reduce((a, b) => a + b, 0);
    columns.push(
      drawColumn(
        list.map((c, k) => [c.id, p[k]]),
        {u, token: list[i].id, below, probability: p[i]},
      ),
    );
  }
  return columns;
}
