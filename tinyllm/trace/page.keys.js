/* Keys, find, help, theme. */
function keys(e) {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const all = rows(),
    row = all.indexOf(state.layer),
    att = attentionOf(state.layer);
  const moves = {
    ArrowLeft: () => go({token: Math.max(0, state.token - 1), ...stepAt(state.token - 1)}, true),
    ArrowRight: () => go({token: Math.min(T - 1, state.token + 1), ...stepAt(state.token + 1)}, true),
    ArrowUp: () => go({layer: all[Math.max(0, (row < 0 ? 0 : row) - 1)]}, true),
    ArrowDown: () => go({layer: all[Math.min(all.length - 1, row + 1)]}, true),
    '[': () => att && go({head: ((state.head ?? 0) + att.heads - 1) % att.heads}, true),
    ']': () => att && go({head: state.head === null ? 0 : (state.head + 1) % att.heads}, true),
    n: () => toStep(state.step + 1),
    p: () => toStep(state.step - 1),
    Enter: () => att && state.head === null && go({head: 0}),
    s: () => go({mode: state.mode === 'apart' ? 'raw' : 'apart'}, true),
    v: () => go({mode: state.mode === 'value' ? 'raw' : 'value'}, true),
    d: theme,
    '/': () => findBox.focus(),
    '?': help,
  };
  if (!moves[e.key]) return;
  e.preventDefault();
  moves[e.key]();
  if (e.key.startsWith('Arrow') && state.head === null) {
    reveal();
    say(lensWords());
  }
}

function toStep(i) {
  i = clamp(i, 0, D.steps.length - 1);
  go({step: i, token: D.steps[i].position}, true);
  reveal();
}

function reveal() {
  const x = state.token * CW,
    room = scroller.clientWidth - RAIL;
  if (x < scroller.scrollLeft) scroller.scrollLeft = x;
  const end = Math.min(N, state.token + 2) * CW; // what came next is seen as well
  if (end > scroller.scrollLeft + room) scroller.scrollLeft = end - room;
}
lensCanvas.addEventListener('keydown', keys);
lensCanvas.addEventListener('click', e => {
  const box = lensCanvas.getBoundingClientRect(),
    all = rows();
  const r = clamp(Math.floor((e.clientY - box.top) / rowHeight()), 0, all.length - 1),
    x = e.clientX - box.left - RAIL + scroller.scrollLeft;
  if (e.clientX - box.left < RAIL) go({layer: all[r]});
  else if (x >= 0 && x < T * CW) {
    const token = Math.floor(x / CW);
    go({layer: all[r], token, ...stepAt(token)});
  }
});
lensCanvas.addEventListener('mousemove', e => {
  const box = lensCanvas.getBoundingClientRect(),
    all = rows(),
    s = all[clamp(Math.floor((e.clientY - box.top) / rowHeight()), 0, all.length - 1)];
  const t = Math.floor((e.clientX - box.left - RAIL + scroller.scrollLeft) / CW),
    at = s * T + t;
  lensCanvas.title =
    A.ranks && t >= 0 && t < T && A.ranks[at] >= 0
      ? `${half(s)} · ${t} ${D.tokens[t].text}: ` +
        [0, 1, 2, 3, 4].map(k => `${piece(A.ids[at * 5 + k])} ${pct(A.probs[at * 5 + k] / 65535)}`).join('  ') +
        ' · ' +
        word('cell', {
          token: piece(D.answers[t]),
          rank: A.ranks[at] + 1,
          entropy: (A.entropy[at] / 2000).toFixed(1),
          kl: (A.kl[at] / 1000).toFixed(1),
        })
      : '';
});

function find(text) {
  if (!text) return;
  const wanted = text.toLowerCase().replaceAll(' ', '·');
  for (let k = 1; k <= T; k++) {
    const i = (state.token + k) % T;
    if (D.tokens[i].text.toLowerCase().includes(wanted) || String(D.tokens[i].id) === text) {
      go({token: i, ...stepAt(i)});
      reveal();
      say(lensWords());
      return;
    }
  }
  say(word('not_found'));
}
let focusBefore = null;

function help() {
  focusBefore = document.activeElement;
  put(
    overlay,
    h(
      'header',
      {},
      h('h2', {}, word('keys')),
      h('span', {class: 'aside'}, h('button', {onclick: closeOverlay}, word('close'))),
    ),
    h(
      'table',
      {},
      KEYS.map(([k, what]) => h('tr', {}, h('td', {class: 'mono'}, k), h('td', {class: 'piece'}, word('key_' + what)))),
    ),
    h('p', {}, word('keys_note')),
  );
  overlay.dataset.kind = 'help';
  overlay.hidden = false;
  overlay.focus();
}

function closeOverlay() {
  overlay.hidden = true;
  if (overlay.dataset.kind === 'head') go({head: null});
  (focusBefore && focusBefore.isConnected ? focusBefore : lensCanvas).focus();
}
document.addEventListener('keydown', e => {
  if (e.key === 'Escape' && !overlay.hidden) {
    e.preventDefault();
    closeOverlay();
  } else if (e.key === 'Escape' && state.layer !== NS - 1) go({layer: NS - 1}, true);
});

function theme() {
  const now = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  document.documentElement.dataset.theme = now;
  try {
    localStorage.setItem('tinyllm-theme', now);
  } catch {
    /* pages from files may have no storage */
  }
  render();
}

function startTheme() {
  let kept = null;
  try {
    kept = localStorage.getItem('tinyllm-theme');
  } catch {
    /* see above */
  }
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  document.documentElement.dataset.theme = kept || (dark.matches ? 'dark' : 'light');
  dark.addEventListener('change', () => {
    document.documentElement.dataset.theme = dark.matches ? 'dark' : 'light';
    render();
  });
}

function render() {
  colours();
  says.textContent = D.steps[state.step].sentence;
  halvesButton.setAttribute('aria-pressed', String(state.halves));
  tokenButtons.forEach((b, i) => {
    b.setAttribute('aria-current', String(i === state.token));
    b.tabIndex = i === state.token ? 0 : -1;
  });
  drawLens();
  drawLensTable();
  drawDetail();
  drawFunnel();
  drawWrites();
  drawChoices();
  drawOverview();
  drawHead();
}
strip.addEventListener('keydown', e => {
  if (e.key !== 'ArrowLeft' && e.key !== 'ArrowRight') return;
  keys(e);
  tokenButtons[state.token].focus();
});
scroller.addEventListener('scroll', drawLens, {passive: true});
window.addEventListener('resize', render);
window.addEventListener('popstate', () => {
  readHash();
  render();
});
window.addEventListener('hashchange', () => {
  readHash();
  render();
});
startTheme();
buildStrip();
readHash();
render();
reveal();
Promise.all(
  [
    ['ids', 'lens-ids', Int32Array],
    ['probs', 'lens-probs', Uint16Array],
    ['ranks', 'lens-ranks', Int32Array],
    ['entropy', 'lens-entropy', Uint16Array],
    ['kl', 'lens-kl', Uint16Array],
    ['norms', 'norms', Float32Array],
    ['writes', 'writes', Float32Array],
    ['stages', 'stages', Float32Array],
    ['active', 'active', Uint16Array],
  ].map(async ([key, id, Type]) => {
    A[key] = await numbers(id, Type);
  }),
).then(() => {
  render();
  document.documentElement.dataset.ready = 'yes';
});
