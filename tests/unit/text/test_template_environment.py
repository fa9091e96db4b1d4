"""What chat templates may use, and what they may not make."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from libs.text.template_environment import RangeBudget, template_environment


def render(source: str, **values: Any) -> str:
    environment = template_environment(lambda: datetime(2026, 2, 3))
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
    ],
)
def test_nothing_huge_is_made(source: str) -> None:
    with pytest.raises((SecurityError, OverflowError)):
        render(source)


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
