"""How Σ, schedules and samplers are written: NAME:key=value,…"""

import pytest
from problems import refused

import nidiff
from nidiff.notation import call, parse_call


def test_a_text_is_a_name_and_its_arguments():
    for text, arguments in {
        "name": {},
        "name:": {},
        " name : a = 1 , b = word ,": {"a": 1, "b": "word"},
        "name:a=-3,b=+2,c=1e-3,d=.5": {"a": -3, "b": 2, "c": 0.001, "d": 0.5},
        "name:a=true,b=False,c=truer": {"a": True, "b": False, "c": "truer"},
        "name:a=x=y": {"a": "x=y"},
        "name:a=1/2.5,b=fixed/periodic,c=/a/b": {"a": (1, 2.5), "b": ("fixed", "periodic"), "c": "/a/b"},
    }.items():
        name, parsed = parse_call("thing", text)
        assert name == "name"
        assert parsed == arguments
        assert [type(value) for value in parsed.values()] == [type(value) for value in arguments.values()]
    for text in ("name:1", "name:a=", "name:=1", "name:a=1,a=2"):
        with refused("thing"):
            parse_call("thing", text)


def test_a_call_says_what_the_function_takes():
    def power(base: float, exponent: float = 2.0) -> float:
        return base**exponent

    def free(base: float, **options: float) -> float:
        return base + sum(options.values())

    known = {"power": power, "free": free}
    assert call("thing", "power", {"exponent": 3}, known, 2.0) == 8.0
    assert call("thing", "free", {"anything": 3}, known, 2.0) == 5.0
    for name, arguments, message in (
        ("powr", {}, "thing='powr'.*did you mean 'power'"),
        ("power", {"base": 1, "height": 2}, "thing='power'.*argument 'height'.: it takes base, exponent"),
        ("power", {"exponent": 2}, "thing='power'.*'base'"),
    ):
        with pytest.raises(nidiff.InputError, match=message):
            call("thing", name, arguments, known)
