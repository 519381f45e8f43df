"""Templates: chat templates of a bundle that try to leave the sandbox, to fill the memory or never to end."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from random import Random

from attack.mutations import repair
from attack.opener import Opener
from attack.outcome import Budget, Outcome

_EXPRESSIONS = """\
''.__class__.__mro__[1].__subclasses__()
messages.__class__.__init__.__globals__
self.__init__.__globals__
cycler.__init__.__globals__.os.popen('id').read()
joiner.__init__['__globals__']
namespace.__init__.__code__
''|attr('__class__')
'{0.__class__.__mro__}'.format('')
'%s' % messages.__class__
lipsum.__globals__
messages[0].__class__.__base__
(1).__class__
raise_exception('x')
1 // 0
undefined.missing.deeper
messages.append(1)
messages.clear()
messages[0].update(content='x')
range(10**9)|list|length
[[]]|tojson
'a' * 10**5
'\\ud800'
messages|map(attribute='__class__')|list
[1]|sort(attribute='__class__')"""
_STATEMENTS = """\
{% include '/etc/passwd' %}
{% import 'os' as os %}
{% extends '/etc/passwd' %}
{% if %}
{{
{% for %}
{% set x = namespace() %}{% set x.__class__ = 1 %}
{% macro f() %}{{ f.__globals__ }}{% endmacro %}{{ f() }}
{% for i in range(10**9) %}x{% endfor %}"""
_TIME_BOMBS = """\
{{ 10 ** (10 ** 8) }}
{{ (10 ** (10 ** 7)) | string }}
{{ lipsum(n=1000000) }}
{{ 'x' * 10 ** 9 }}
{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}
{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}
{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}
{% for i in range(99999) %}{{ messages * 99999 }}{% endfor %}
{{ range(99999) | list * 99999 }}
{{ '%999999999d' % 1 }}
{{ 'a' | center(10 ** 9) }}
{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 5) }}
{{ messages | tojson(indent=10 ** 9) }}"""
_LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
TIME_BOMBS = (*_TIME_BOMBS.splitlines(), _LOOPS)
ALONE = (
    *TIME_BOMBS,
    *(f"{{{{ {expression} }}}}" for expression in _EXPRESSIONS.splitlines()),
    *_STATEMENTS.splitlines(),
    *("{{ '" + "{" * 5000 + "' }}", "{% raw %}" * 500, "\0", "", "\ufeff{{ 1 }}"),
)


def hostile_templates(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Open bundles with hostile templates, whose hashes are right, and generate from messages."""
    outcome, opener, folder = Outcome("templates", seed), Opener(), work / "template"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bundle, folder)
    longest = 0.0
    for number in budget.numbers():
        random = Random(f"{seed} {number}")  # each one alone at first, then random sequences of them
        template = ALONE[number] if number < len(ALONE) else "x".join(random.choices(ALONE, k=random.randrange(2, 5)))
        (folder / "chat_template.jinja").write_text(template, "utf-8", "surrogatepass")
        repair(folder)
        began = time.monotonic()
        result = opener.open(folder)
        longest = max(longest, time.monotonic() - began)
        generated = result.startswith("tokens") and template not in TIME_BOMBS
        name = "generated" if result.startswith("tokens") else result
        outcome.note(f"{number} {template[:60]!r}", name, generated or "refused" in result)
    outcome.figures |= {"time bombs": str(min(outcome.cases, len(TIME_BOMBS))), "longest": f"{longest:.1f} s"}
    opener.close()
    shutil.rmtree(folder)
    return outcome
