"""Parts of a module of one's own work in every command, and a model that needs it says so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nidiff.cli import main
from nidiff.covariance.fields import COVARIANCES, FAMILIES, FIELDS
from nidiff.evaluation.metrics import METRICS
from nidiff.model.network import BUILDERS, NETWORKS
from nidiff.plugins import IMPORTED
from nidiff.sampling.sampler import SAMPLERS

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin"
SHORT = ["--steps", "2", "--cooldown", "0", "--batch-size", "8", "--precision", "fp32", "--no-report"]
OWN = ["--covariance", "stripes:strength=8", "--network", "tiny:width=8", "--sampler", "restless:rate=0.2"]


@pytest.fixture
def forgotten(monkeypatch):
    """Takes away what a plugin adds, and can do so in the middle of a test."""
    registries = [COVARIANCES, FAMILIES, FIELDS, METRICS, BUILDERS, NETWORKS, SAMPLERS]
    before = [dict(registry) for registry in registries]
    monkeypatch.setattr(sys, "path", [*sys.path])

    def forget():
        for registry, entries in zip(registries, before, strict=True):
            for name in registry.keys() - entries.keys():
                del registry[name]
        sys.modules.pop("nidiff_stripes", None)
        IMPORTED.clear()

    yield forget
    forget()


def test_a_module_of_one_s_own_in_every_command(forgotten, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(TEMPLATE / "nidiff_stripes.py", tmp_path)
    assert main(["--import", "nidiff_stripes", "train", *OWN, *SHORT, "--out", "run"]) == 0, capsys.readouterr().err
    measured = ["--seeds", "0-9", "--num-steps", "2", "--features", "pixels", "--num-real", "50", "--bootstrap", "0"]
    capsys.readouterr()
    assert main(["evaluate", "run", "--import=nidiff_stripes", *measured, "--json"]) == 0
    assert "brightness" in json.loads(capsys.readouterr().out)["metrics"]
    assert main(["sweep", "--commands", "--import", "nidiff_stripes", *OWN, "--seed", "0-1"]) == 0
    assert capsys.readouterr().out.count("nidiff --import nidiff_stripes train") == 2

    forgotten()
    assert str(tmp_path) not in sys.path  # where other files could be taken for modules
    assert main(["sample", "run", "--seeds", "0"]) == 2
    assert "nidiff --import nidiff_stripes" in capsys.readouterr().err
    assert main(["--import", "nidiff_stripes", "sample", "run", "--seeds", "0", "--num-steps", "2"]) == 0


def test_models_of_nidiff_s_own_parts_need_no_module(tmp_path):
    assert main(["train", *SHORT, "--out", str(tmp_path / "run")]) == 0
    assert "_modules" not in (tmp_path / "run/model/scheduler/scheduler_config.json").read_text()


@pytest.mark.parametrize(
    "words", [["--import"], ["--import", "--quiet"], ["--import="], ["--import", "no_such_module"]]
)
def test_a_module_that_is_missing_is_refused_in_a_sentence(forgotten, capsys, words):
    assert main([*words, "models"] if words[-1].startswith("no") else ["models", *words]) == 2
    error = capsys.readouterr().err
    assert "--import" in error
    assert error.count("\n") == 1


def test_a_module_that_fails_says_what_it_said(forgotten, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_plugin.py").write_text("raise KeyError('left')\n")
    assert main(["--import", "broken_plugin", "models"]) == 2
    assert "KeyError: 'left'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_template_installed(tmp_path):
    """pip finds the entry point, and a new process the plugin; one that breaks costs a warning, not the command."""
    installed = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", installed, TEMPLATE], check=True)
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": f"{installed}:{':'.join(sys.path)}"}

    def nidiff(*words):
        program = [sys.executable, "-m", "nidiff", *words]
        return subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)

    drawn = nidiff("noise", "stripes:strength=8", "--shape", "16", "16", "--out", "stripes.png")
    assert drawn.returncode == 0, drawn.stderr
    (installed / "nidiff_stripes.py").write_text("raise ImportError('half installed')\n")
    without = nidiff("noise", "white", "--shape", "16", "16", "--out", "white.png")
    assert without.returncode == 0
    assert "half installed" in without.stderr
