"""Templates by strangers: whatever they ask for, they end soon, with an error and without filling the memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_cases import DATA, TURNS, USER
from tinyllm.chat_format import ChatTemplate
from tinyllm.errors import ChatTemplateError

MILLION = "{% set a = 'a' * 1000000 %}"


def repeated(start: str, step: str, end: str = "", times: int = 60) -> str:
    """A template that begins with `n.x = start` and does `step` again and again."""
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}{end}"


def nested(*bodies: str) -> str:
    """Loops of 99,999 rounds inside each other around a body."""
    *loops, body = bodies
    return "".join(f"{{% for {name} in range(99999) %}}" for name in loops) + body + "{% endfor %}" * len(loops)


HOSTILE = {
    "loops": nested("a", "b", "c", ""),
    "range": "{% for a in range(10**9) %}x{% endfor %}",
    "output": nested("a", "x" * 100_000),
    "product": "{{ 'a' * 10**10 }}",
    "product of a variable": "{% set n = 10**10 %}{{ n * ['a'] }}",
    "power": "{{ 10 ** 100000000 }}",
    "squares": repeated("3", "{% set n.x = n.x * n.x %}", "{{ n.x }}"),
    "doubled text": repeated("'ab'", "{% set n.x = n.x ~ n.x %}"),
    "doubled sum": repeated("'ab'", "{% set n.x = n.x + n.x %}"),
    "doubled block": repeated("'ab'", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "shared lists": repeated("[1]", "{% set n.x = [n.x, n.x] %}", "{{ n.x }}"),
    "shared mappings": repeated("1", "{% set n.x = dict(a=n.x, b=n.x) %}", "{{ n.x | tojson }}"),
    "shared tuples": repeated("1", "{% set n.x = (n.x, n.x) %}", "{{ {n.x: 1} }}"),
    "kept texts": repeated("[]", "{% set n.x = n.x + ['a' * 100000] %}", times=99999),
    "kept slices": MILLION + repeated("[]", "{% set n.x = n.x + [a[1:]] %}", times=99999),
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "ljust of bytes": "{{ 'a'.encode().ljust(10**10) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "center": "{{ 'a' | center(10**10) }}",
    "expandtabs": "{{ ('\t' * 10000).expandtabs(9999) }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "format nested width": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' | format(10**10, 1) }}",
    "replace": MILLION + "{{ a.replace('a', a) }}",
    "replace by names": MILLION + "{{ a | replace(old='a', new=a) }}",
    "join": MILLION + "{{ a.join(range(99999) | map('string')) }}",
    "join filter": MILLION + "{{ range(99999) | join(a) }}",
    "indent": "{{ ('\n' * 100000) | indent(9999) }}",
    "wordwrap": MILLION + "{{ ('a ' * 100000) | wordwrap(1, wrapstring=a) }}",
    "translate": MILLION + "{{ a.translate({97: a}) }}",
    "json indent": "{{ [[1] * 1000] | tojson(indent=10**9) }}",
    "lipsum": "{{ lipsum(9999, min=9998, max=9999) }}",
    "round": "{{ 5 | round(10**9, 'floor') }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursive loop": "{% for x in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "lists by map": "{{ ([range(99999)] * 99999) | map('list') | list }}",
    "sum of lists": "{% set b = [1] * 99999 %}{{ ([b] * 99999) | sum(start=[]) }}",
    "searches": "{% set l = range(99999) | list %}" + nested("i", "{% if -1 in l %}{% endif %}"),
    "comparisons": "{% set a = [1] * 99999 %}{% set b = [1] * 99999 %}" + nested("i", "{{ a == b }}"),
    "counts": MILLION + nested("i", "{% set b = a.count('ab') %}"),
    "sums": nested("i", "{{ range(99999) | map(attribute='real') | sum }}"),
    "tests": "{% set l = range(99999) | map('string') | list %}{{ l | select('in', l) | list }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_ends_soon_with_an_error(source):
    with pytest.raises(ChatTemplateError, match=r"the chat template (failed|cannot be compiled)"):
        ChatTemplate(source).render(USER)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's peak memory")
def test_hostile_templates_need_little_memory():
    """What the worst of those that want much ever held, in MB."""
    script = (
        "from tests.test_chat_limits import *\n"
        "for name in ('output', 'doubled text', 'kept texts', 'join', 'replace', 'indent', 'shared lists'):\n"
        "    try: ChatTemplate(HOSTILE[name]).render(USER)\n"
        "    except ChatTemplateError: pass\n"
        # Not getrusage: it remembers what the process that was forked had.
        "print(next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM')) // 1024)"
    )
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=root)
    assert int(run.stdout) < 500, run.stderr


def test_a_long_conversation_is_no_hostile_template():
    messages = TURNS[:1] + [
        {"role": role, "content": f"{number} " + "word " * 400}
        for number in range(300)
        for role in ("user", "assistant")
    ]
    for entry in DATA["templates"]:
        if any(case["name"] == "multi_turn" and "expected" in case for case in entry["cases"]):
            assert "299 word" in ChatTemplate(entry["text"], "<s>", "</s>").render(messages)
