"""Templates stop themselves: endless loops, output bombs and huge values end in an error, soon and in little memory."""

import time
import tracemalloc
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.text.sandbox import MAX_RENDER_CHARS, Budget, RenderLimitError, TemplateEnvironment, render_within


def render(source: str, *, seconds: float = 0.3, chars: int = MAX_RENDER_CHARS, **variables: Any) -> str:
    return render_within(TemplateEnvironment().from_string(source), variables, Budget(seconds=seconds, chars=chars))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set l = range(99999)|list %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
        "{% set l = range(99999)|list %}{% for i in l %}{% for j in l if j < 0 %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if i < 0 %}{% else %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% if j %}{% endif %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for x in [[]] recursive %}{{ loop([[], []]) }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}{% endset %}",
    ],
)
def test_endless_work_ends_in_an_error(source: str) -> None:
    started = time.monotonic()
    with pytest.raises((RenderLimitError, RecursionError)):
        render(source)
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
        "{% set b %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
        "{% macro f() %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endmacro %}{{ f()|length }}",
        "{% filter upper %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endfilter %}",
    ],
)
def test_too_long_output_ends_in_an_error_before_it_is_built(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RenderLimitError, match="wrote more than 1000000 characters"):
            render(source, seconds=5.0, chars=1_000_000, s="x" * 1000)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "expression",
    [
        "'x' * 99999999",
        "99999999 * 'x'",
        "[1] * 99999999",
        "'%99999999d' % 1",
        "'%*d' % (99999999, 1)",
        "'%.*f' % (99999999, 1)",
        "'{:99999999}'.format(1)",
        "'{:{}}'.format(1, 99999999)",
        "'{0:{1}}'.format(1, 99999999)",
        "'%99999999d'|format(1)",
        "'%(a)-99999999d' % {'a': 1}",
        "'{a:>99999999}'.format_map({'a': 1})",
        "'x'.center(99999999)",
        "'x'.ljust(width=99999999)",
        "'x'.zfill(99999999)",
        "'\t'.expandtabs(99999999)",
        "'x'|center(99999999)",
        "'x\ny'|indent(99999999)",
        "'x\ny'|indent(width=99999999)",
        "[1]|batch(99999999, 'x')|list",
        "[1]|slice(99999999)|list",
        "[1]|tojson(indent=99999999)",
        "big.replace('', big)",
        "big|replace('x', big)",
        "big.join(big)",
        "big.join([big] * 99)",
        "([big] * 9999)|map('upper')|list",
        "([big] * 9999)|map('upper')|sort",
        "([big] * 9999)|join",
        "([big] * 9999)|map('upper')|join(big)",
        "big.translate({120: big})",
        "2 ** 99999999",
        "(2 ** 4000) * (2 ** 4000)",
        "lipsum(n=99999)",
    ],
)
def test_huge_value_is_refused_before_it_is_built(expression: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((RenderLimitError, SecurityError)):
            render("{% set y = " + expression + " %}{{ y|length }}", seconds=20.0, big="x" * 100_000)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "step",
    ["ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "[ns.x, ns.x]|join", "ns.x ~ 'y' ~ ns.x", "[1] + (ns.x|list) * 2"],
)
def test_doubling_ends_at_the_limit(step: str) -> None:
    source = "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = " + step + " %}{% endfor %}"
    with pytest.raises(RenderLimitError, match=f"larger than {MAX_RENDER_CHARS}"):
        render(source, seconds=20.0)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ zork }}", "a1None"),
        ("{{ ('a' ~ 1)|upper }}{{ ['x', 'y' ~ 2] }}", "A1['x', 'y2']"),
        ("{{ 7 * 6 }} {{ 2 ** 10 }} {{ '%s-%03d' % ('a', 5) }} {{ 10 ** 12 }}", "42 1024 a-005 1000000000000"),
        (
            "{{ '%s' % 99999999 }} {{ '{}'.format(1700000000) }} {{ 99999999|default(3) }}",
            "99999999 1700000000 99999999",
        ),
        (
            "{{ 'x'|center(5) }}|{{ 'ab'|replace('a', 'c') }}|{{ [1, 2]|join('-') }}|{{ 'ab'|join(',') }}",
            "  x  |cb|1-2|a,b",
        ),
        ("{{ (1, 2)|map('string')|join('+') }}|{{ ','.join(['a', 'b']) }}|{{ {'a': 1}|join }}", "1+2|a,b|a"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2] %}{% generation %}{{ i }}{% break %}{% endgeneration %}{% endfor %}", "1"),
        ("{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/2,2/2"),
        ("{% macro f(a) %}[{{ a }}{{ caller() if caller }}]{% endmacro %}{% call f(2) %}in{% endcall %}", "[2in]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ x is string }}", "a1True"),
        ("{{ namespace(self=1).self }}", "1"),
        ("{{ '<&>'|e }}{{ '<&>' }}", "&lt;&amp;&gt;<&>"),
    ],
)
def test_counting_changes_no_rendering(source: str, text: str) -> None:
    assert render(source) == text


def test_names_of_the_machinery_are_out_of_reach() -> None:
    assert (
        render("{{ count is defined }}{{ concatenate is defined }}{{ budget is defined }}{{ environment is defined }}")
        == "False" * 4
    )
    with pytest.raises(UndefinedError):
        render("{{ self.environment.count }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ dict.__class__.__base__ }}",
        "{{ dict.mro() }}",
    ],
)
def test_python_stays_out_of_reach(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source, messages=[])


def test_counting_costs_little_beside_plain_jinja() -> None:
    source = (
        "{% for m in messages %}{{ '<' + m.role }}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hello"}] * 20_000
    plain = ImmutableSandboxedEnvironment().from_string(source)
    counted = TemplateEnvironment().from_string(source)

    def seconds(run: Any) -> float:
        started = time.process_time()
        run()
        return time.process_time() - started

    of_plain = min(seconds(lambda: plain.render(messages=messages)) for _ in range(3))
    of_counted = min(
        seconds(lambda: render_within(counted, {"messages": messages}, Budget(seconds=60.0))) for _ in range(3)
    )
    assert of_counted < 8 * of_plain  # about 2
    assert of_counted < 2.0  # 20,000 messages
