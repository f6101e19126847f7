/* The frame of the page. */
const CW = 68,
  RAIL = 132;
const strip = h('div', {class: 'strip'});
const lensCanvas = h('canvas', {class: 'chart', tabindex: 0, role: 'img'});
const lensHolder = h('div', {class: 'sticky'}, lensCanvas);
const inner = h('div', {style: {width: RAIL + N * CW + 'px'}}, strip, lensHolder);
const scroller = h('div', {class: 'scroll'}, inner);
const lensTable = h('div', {class: 'tablebox', hidden: true});
const detail = h('aside', {class: 'panel', 'aria-label': word('selected')});
const says = h('p', {class: 'says'});
const funnelBox = h('div'),
  writesBox = h('div'),
  choicesBox = h('div'),
  overviewBox = h('div');
const overlay = h('section', {
  class: 'panel overlay',
  hidden: true,
  role: 'dialog',
  'aria-modal': 'true',
  tabindex: -1,
});
const findBox = h('input', {
  type: 'search',
  placeholder: word('find'),
  'aria-label': word('find'),
  onkeydown: e => {
    if (e.key === 'Enter') find(e.target.value);
  },
});
const halvesButton = h(
  'button',
  {
    'aria-pressed': 'false',
    onclick: () => {
      state.halves = !state.halves;
      render();
    },
  },
  word('halves'),
);
const tableButton = h(
  'button',
  {
    'aria-pressed': 'false',
    onclick: () => {
      lensTable.hidden = !lensTable.hidden;
      tableButton.setAttribute('aria-pressed', String(!lensTable.hidden));
      render();
    },
  },
  word('table'),
);
const tag = text => h('span', {class: 'tag'}, text);
put(
  $('page'),
  h(
    'header',
    {class: 'bar-top'},
    h('h1', {}, `${D.model}`),
    h('span', {class: 'facts'}, word('facts', D)),
    h(
      'span',
      {class: 'tools'},
      findBox,
      h('button', {onclick: theme}, word('theme')),
      h('button', {onclick: help, 'aria-label': word('keys')}, '?'),
    ),
  ),
  says,
  !canInflate && h('p', {class: 'says', role: 'alert'}, word('no_inflate')),
  h(
    'div',
    {class: 'grid'},
    h(
      'div',
      {class: 'column'},
      h(
        'section',
        {class: 'panel', 'aria-label': word('lens')},
        h(
          'header',
          {},
          h('h2', {}, word('lens')),
          h('span', {class: 'crumb'}, word('lens_note')),
          h(
            'span',
            {class: 'aside'},
            h('span', {class: 'legend'}, word('rank_of', {n: D.n_vocab.toLocaleString('en')}), h('i'), '1'),
            halvesButton,
            tableButton,
          ),
        ),
        scroller,
        lensTable,
      ),
      h('section', {class: 'panel', 'aria-label': word('funnel')}, funnelBox),
      h(
        'div',
        {class: 'row2'},
        h('section', {class: 'panel', 'aria-label': word('writes')}, writesBox),
        h('section', {class: 'panel', 'aria-label': word('choices')}, choicesBox),
      ),
    ),
    detail,
  ),
  h('section', {class: 'panel wide', 'aria-label': word('overview')}, overviewBox),
  h(
    'footer',
    {},
    D.checks.map(c => h('p', {}, c)),
    [D.about_maps, ...D.notes].map(n => h('p', {}, n)),
    h('p', {}, word('attention_note') + ' ' + word('derived_note')),
    h('p', {}, `tinyllm ${D.version}` + (D.command ? ` · ${D.command}` : '')),
  ),
  overlay,
);
