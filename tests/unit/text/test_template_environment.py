"""What chat templates may use, and what they may not make."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from libs.text.template_environment import RangeBudget, template_environment
from libs.text.template_work import MAX_WORK


def render(source: str, *, max_work: int = MAX_WORK, **values: Any) -> str:
    environment = template_environment(lambda: datetime(2026, 2, 3), max_work=max_work)
    return environment.from_string(source).render(values, range=RangeBudget())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': 1, 'a': '<é&>'} | tojson }}", '{"b": 1, "a": "<é&>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ 123456789 | tojson }}", "123456789"),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2026"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}answer{% endgeneration %}!", "answer!"),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ range(3) | list }}{{ range(4, 0, -2) | list }}", "[0, 1, 2][4, 2]"),
        ("{{ '<|' + 'a' * 3 + '|>' }}{{ 'x%s' % 1 }}{{ '{}-{}'.format(1, 2) }}", "<|aaa|>x11-2"),
        ("{{ 'a\nb' | indent(2) }}{{ 'x'.ljust(3) }}|", "a\n  bx  |"),
    ],
)
def test_templates_find_what_they_expect(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set ns = namespace(s='x') %}{% for _ in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{% for _ in range(1000000000) %}{% endfor %}",
        "{% for _ in range(1000) %}{% for _ in range(1000) %}{% endfor %}{% endfor %}",
        # What doubles, also where no operator is asked: ``~`` is compiled to plain Python.
        "{% set ns = namespace(s='x') %}{% for _ in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(n=99) %}{% for _ in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        # What stands for more than it is.
        "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
        "{% set a = 'a' * 100000 %}{{ a | replace(new=a, old='a') }}",
        "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
        "{{ (['a' * 100000] * 100000) | join }}",
        "{{ ''.join(['a' * 100000] * 100000) }}",
        "{{ ([1] * 100000) | join('a' * 100000) }}",
        "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{{ ([b] * 1000) | tojson }}",
        "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{{ ([b] * 1000) | string }}",
        "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{{ [b] * 1000 }}",
        "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{{ 'x' ~ ([b] * 1000) }}",
        "{{ ([[1] * 1000000] * 10000) | sum(start=[]) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ ('a\n' * 1000000) | indent(1000000) }}",
        "{{ ('a ' * 100000) | wordwrap(1, wrapstring='a' * 100000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('{0}' * 100000).format('a' * 1000000) }}",
        "{{ ('%(a)s' * 100000) % {'a': 'a' * 1000000} }}",
        "{{ ('%s' * 1000) % (('a' * 1000000,) * 1000) }}",
        "{{ 'a'.encode().ljust(1000000000) }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ 1.5 | round(1000000000) }}",
        "{% set a %}{% for _ in range(100000) %}{{ 'a' * 1000000 }}{% endfor %}{% endset %}",
    ],
)
def test_nothing_huge_is_made(source: str) -> None:
    with pytest.raises((SecurityError, OverflowError)):
        render(source)


ENDLESS = {
    "a range used again": "{% set r = range(1000) %}" + "{% for _ in r %}" * 3 + "{% endfor %}" * 3,
    "a list": "{% set r = [0] * 1000 %}" + "{% for _ in r %}" * 3 + "{% endfor %}" * 3,
    "a text": "{% set r = 'x' * 1000000 %}" + "{% for _ in r %}" * 2 + "{% endfor %}" * 2,
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for _ in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "a filter": "{% set r = range(90000) | list %}{% for _ in range(9000) %}{{ r | sort | first }}{% endfor %}",
    "a test": "{% set r = range(90000) | list %}{% for _ in range(9000) %}{{ -1 in r }}{% endfor %}",
    "a slice": "{% set r = range(90000) | list %}{% for _ in range(9000) %}{% set x = r[1:] %}{% endfor %}",
    "a block": "{% for _ in range(9000) %}{% set x %}{{ 'a' * 1000000 }}{% endset %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_nothing_goes_on_for_ever(source: str) -> None:
    with pytest.raises(SecurityError, match=r"never seem to end"):
        # Less than is allowed, for the time that it takes.
        render(source, max_work=MAX_WORK // 50)


def test_a_conversation_as_long_as_may_be_is_looked_through_again_for_each_message() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 2048
    source = "{% for m in messages %}{% if loop.last %}{% for n in messages %}{{ n.content | trim }}{% endfor %}"
    source += "{% endif %}{% set found = messages | length %}{{ m.role ~ ':' ~ loop.length }}{% endfor %}"

    assert render(source, messages=messages).count("user:2048") == 2048


def test_loops_know_their_places_and_lengths() -> None:
    places = "{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }} "
    source = "{% for a in values %}" + places + "{% else %}-{% endfor %}"
    pairs = "{% for k, v in values.items() %}{{ k }}{{ v }}{{ loop.length }}{% endfor %}"

    assert render(source, values=["x", "y"]) == "1TrueFalse2 2FalseTrue2 "
    assert render(source, values=[]) == "-"
    assert render(pairs, values={"a": 1}) == "a11"
    assert render("{% for a in absent %}x{% else %}-{% endfor %}") == "-"


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ x.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source, x=[])


def test_random_text_is_not_to_be_had() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("{{ lipsum() }}")


def test_a_templates_own_refusal_keeps_its_words() -> None:
    with pytest.raises(jinja2.TemplateError, match=r"^only user and assistant$"):
        render("{{ raise_exception('only user and assistant') }}")


def test_a_date_needs_no_clock_of_its_own() -> None:
    days = iter([datetime(2026, 1, 1), datetime(2026, 1, 2)])
    template = template_environment(lambda: next(days)).from_string("{{ strftime_now('%d') }}")

    assert [template.render(), template.render()] == ["01", "02"]
