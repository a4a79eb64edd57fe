"""restoration.json, edited by hand or by chance: one sentence, or the same restoration as before."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CASES
from problems import untrained_model

import nidiff
from nidiff.cli import main
from nidiff.sealed import SEAL, seal

VALUES = (None, True, 3, -1.5, "text", "", [], {}, [[]], {"a": 1}, "../../x", 10**400, "\udcff", [None])
WHOLE = ("", "{}", "[]", "null", "3", "[" * 100_000, "9" * 5000, '{"task": Infinity}', '{"task": NaN}', "\ufeff{}", "{")


@pytest.fixture(scope="module")
def restored(tmp_path_factory) -> tuple[Path, list[str]]:
    """A restoration, and the command that made it."""
    place = tmp_path_factory.mktemp("restored")
    np.save(place / "digits.npy", nidiff.load_dataset("digits").stored(torch.arange(1))[:, 0].numpy())
    words = ["restore", str(untrained_model(place / "model")), str(place / "digits.npy"), "--mask", "left", "--degrade"]
    words += ["--samples", "2", "--num-steps", "2", "--out", str(place / "out"), "--json"]
    assert main(words) == 0
    return place / "out", words


def edited(facts: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A value somewhere is another one, or gone, or new."""
    facts = json.loads(json.dumps(facts))
    place = draw.choice([facts, facts, *(part for part in facts.values() if isinstance(part, dict))])
    key = draw.choice([*place, "new"])
    if draw.random() < 0.25:
        place.pop(key, None)
    else:
        place[key] = draw.choice(VALUES)
    return facts


def test_an_edited_restoration_is_one_sentence_or_makes_no_difference(restored, capfd, tally):
    """Also if whoever edits it writes a new checksum: then another value of the scores may be believed, and no more."""
    (out, words), wrong, draw = restored, [], random.Random("restoration.json")
    file = out / "restoration.json"
    text = file.read_text()
    facts = {key: value for key, value in json.loads(text).items() if key != SEAL}
    unchanged = json.dumps(json.loads(text))
    cases: list[tuple[str, str]] = [("a file of another kind", content) for content in WHOLE]
    for _ in range(14 * CASES):
        changed = edited(facts, draw)
        cases += [("with the old seal", json.dumps({**changed, SEAL: json.loads(text)[SEAL]}))]
        cases += [("sealed again", json.dumps(seal(changed))), ("without a seal", json.dumps(changed))]
    for kind, content in cases:
        file.write_bytes(content.encode(errors="surrogateescape"))
        for command in (words, ["verify", str(out)]):
            capfd.readouterr()
            try:
                code = main(command)
            except Exception as error:
                wrong.append(f"{command[0]}, {kind}: {type(error).__name__} {content[:200]}")
                continue
            said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("nidiff: ")]
            may_be_0 = kind == "sealed again" or content == unchanged
            if code not in (0, 2) or (code == 2) != (len(said) == 1) or (code == 0 and not may_be_0):
                wrong.append(f"{command[0]}, {kind}: exit {code} {said} {content[:200]}")
            if any("( differ)" in line or " ()" in line for line in said):
                wrong.append(f"{command[0]}, {kind}: {said}")
    file.write_text(text)
    tally("edited restoration.json", 2 * len(cases), len(wrong))
    assert main(words) == main(["verify", str(out)]) == 0  # negative control
    assert not wrong, "\n".join(wrong)
