import subprocess
import sys
from argparse import ArgumentParser

import pytest

from inferpool.service.train.flags import add_flags
from inferpool.service.train.settings import TrainSettings


def parser() -> ArgumentParser:
    made = ArgumentParser(prog="train", allow_abbrev=False)
    add_flags(made)
    return made


def test_every_setting_has_a_flag_with_its_docstring():
    actions = {each.dest: each for each in parser()._actions}
    for name, field in TrainSettings.model_fields.items():
        text = " ".join((field.description or "").split())
        assert text in str(actions[name].help).replace("%%", "%"), name
        if name != "data":
            assert f"--{name.replace('_', '-')}" in actions[name].option_strings


def test_flags_that_are_not_given_say_nothing():
    args = vars(parser().parse_args([]))
    assert {name: args.pop(name) for name in ("resume", "overwrite", "quiet")} == {
        **dict.fromkeys(("resume", "overwrite", "quiet"), False)
    }
    assert {*args} == {"config", *TrainSettings.model_fields}
    assert {*args.values()} == {None}


def test_what_is_true_or_false_has_two_flags():
    args = parser().parse_args(["photos", "--no-flip", "--freeze-norm", "--options", "a=1"])
    assert (args.data, args.flip, args.freeze_norm, args.options) == (
        *("photos", False, True, ["a=1"]),
    )


def test_a_run_is_not_resumed_and_overwritten(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["photos", "--resume", "--overwrite"])
    assert "not allowed with" in capsys.readouterr().err


def test_the_help_imports_little():
    code = (
        "import sys; from argparse import ArgumentParser\n"
        "from inferpool.service.train.flags import add_flags\n"
        "parser = ArgumentParser(); add_flags(parser); parser.format_help()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = {*done.stdout.split()}
    assert "inferpool.service.train.flags" in loaded
    assert loaded & {"torch", "pydantic", "msgspec", "numpy", "PIL", "asyncio"} == set()
