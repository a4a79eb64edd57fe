"""Models that ship: found by name, refused if changed, never written to, and each repeats the picture on its card."""

import hashlib
import json
import os
import runpy
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused, without
from safetensors.torch import load_file

import nidiff
from nidiff.cli import main
from nidiff.commands.models import described
from nidiff.commands.train import Train
from nidiff.commands.usage import parse
from nidiff.data.grid import Grid
from nidiff.data.spec import DataSpec
from nidiff.diffusion.choice import Choice
from nidiff.errors import FileError, InputError
from nidiff.evaluation.results import Measured, Result, read_results, remember
from nidiff.extras import EXTRAS
from nidiff.generation.job import plan_job
from nidiff.generation.loaded_model import SingleProcess, open_model
from nidiff.model import zoo
from nidiff.model.folder import load_model, read_grid
from nidiff.model.manifest import model_sha256
from nidiff.model.sampling import SAMPLING, store_choices
from nidiff.training.experiment import PRESETS, Experiment, read_experiment
from nidiff.training.identity import settings_digest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from card_picture import as_levels, difference, draw_samples, limits_of, read_levels, save_picture  # noqa: E402
from packing import pack, redraw, rewrite_card  # noqa: E402

NAME, TITLE = "tiny-digits", "Digits after five steps, which are noise."
SHIPPED = sorted(zoo.zoo_models().items())
TRAINING = ("--steps", "5", "--warmup", "1", "--cooldown", "0", "--widths", "8", "16", "--batch-size", "16")
CHOICE = Choice(5, "ddim:eta=0.5", 5, {"data": "digits"})
CPU = SingleProcess(torch.device("cpu"))


def script(name: str) -> dict:
    return runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))


def asked_for(command: str) -> Experiment:
    """The experiment that a command line of `nidiff train` trains."""
    program, name, *words = shlex.split(command)
    assert (program, name) == ("nidiff", "train")
    return parse(Train, words, prog="nidiff train", default=Train.defaults(words)).experiment


def contents(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def result(sha256: str, sampler: str, value: float) -> Result:
    provenance = {"model_sha256": sha256, "real": "digits", "num_generated": 100}
    metrics = {"FD-pixels": Measured(value, 0.1), "precision": Measured(0.5, 0.01, True)}
    return Result("run", sampler, 10, "uniform", seeds="0-99", metrics=metrics, provenance=provenance)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with three results, one of them of another model."""
    out = tmp_path_factory.mktemp("runs") / "some-run"
    assert main(["train", *TRAINING, "--num-samples", "1", "--num-steps", "3", "--out", str(out)]) == 0
    own = model_sha256(out / "model")
    for one in (result(own, "ddim", 30.0), result(own, "dpmpp_2m", 20.0), result("0" * 64, "ddim", 1.0)):
        remember(out, one)
    store_choices(out / "model" / SAMPLING, [CHOICE], own)
    return out


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("zoo")
    words = [str(run), NAME, "--title", TITLE, "--seeds", "0-4", "--num-steps", "3", "--into", str(place)]
    assert script("pack_model")["main"](words) == 0
    return place / NAME


@pytest.fixture
def entry(packed, monkeypatch, tmp_path):
    """A copy of the packed model, in a place where models are looked for; we are in an empty folder."""
    place, here = tmp_path / "place", tmp_path / "here"
    shutil.copytree(packed, place / NAME)
    here.mkdir()
    monkeypatch.chdir(here)
    zoo.PLACES.append(place)
    yield place / NAME
    zoo.PLACES.remove(place)


@pytest.fixture
def say(capsys):
    def run(*words):
        capsys.readouterr()
        code = main(list(map(str, words)))
        return code, *capsys.readouterr()

    return run


# Each model that ships ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, path", SHIPPED)
def test_a_model_that_ships_is_whole_small_trained_by_its_command_and_repeats_its_picture(name, path):
    """Two of the picture's seeds, drawn again, are within one grey level of it, on any processor; and its command
    trains it."""
    assert zoo.find_model(name) == path
    card, experiment = zoo.check_entry(path), read_experiment(path)
    assert zoo.entry_bytes(path) <= zoo.MOST_BYTES
    weights = load_file(path / "model/unet/diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} <= {torch.float16, torch.int64}
    assert difference(path, card.picture.seeds[:2], tile=2) <= 1
    assert Train.defaults(["--config", name]).experiment == experiment
    assert asked_for(card.command) == experiment == asked_for(experiment.command())
    identity = json.loads((path / "experiment.json").read_text())["identity"]
    assert identity["settings"] == settings_digest(experiment)
    assert card.images == experiment.steps * experiment.batch_size
    if (path / "metrics.json").is_file():
        shas = {one.provenance["model_sha256"] for one in read_results(path / "metrics.json")}
        assert shas == {card.trained_sha256}


def test_all_that_ships_is_small_together():
    assert sum(zoo.entry_bytes(path) for _, path in SHIPPED) <= zoo.MOST_TOGETHER


# Packing -----------------------------------------------------------------------------------------------------------


def test_a_packed_model_repeats_its_picture_and_another_picture_is_seen_in_the_difference(packed, tmp_path):
    """The negative control: the largest difference is that of a changed pixel."""
    assert difference(packed) == 0
    other = shutil.copytree(packed, tmp_path / "other")
    with Image.open(other / "samples.png") as image:
        pixels = np.array(image)
    pixels[0, 0] ^= 64  # the first of an enlarged pixel, which is what is read
    Image.fromarray(pixels).save(other / "samples.png")
    card = zoo.read_card(other)
    files = {name: hashlib.sha256((other / name).read_bytes()).hexdigest() for name in card.files}
    (other / "zoo.json").write_text(json.dumps(replace(card, files=files).to_json()))
    assert difference(other, [0]) == 64
    assert difference(other, [1]) == 0


def test_an_entry_has_float16_the_chosen_sampler_no_path_of_the_machine_and_nothing_that_is_not_needed(run, packed):
    needed = ["experiment.json", "metrics.json", "model", "samples.png", "zoo.json"]
    assert sorted(path.name for path in packed.iterdir()) == needed
    before, after = load_model(run).net.state_dict(), load_model(packed).net.state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], weight.half().float())
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())  # rounding is seen
    before, after = load_model(run).mixture, load_model(packed).mixture
    assert torch.equal(after.factors, before.factors.half().float())
    assert not torch.equal(after.factors, before.factors)
    assert torch.equal(after.variances, before.variances)
    assert load_model(packed).choices == (CHOICE,)
    before, after = load_model(run).kappa, load_model(packed).kappa
    assert torch.equal(after.values, before.values.half().float())
    assert torch.equal(after.trust, before.trust.half().float())
    before, after = (json.loads((place / "experiment.json").read_text()) for place in (run, packed))
    assert after == before | {"data_dir": None}
    text = b"".join(file.read_bytes() for file in packed.rglob("*.*") if file.suffix in (".json", ".md"))
    assert str(run.parent).encode() not in text
    assert os.fsencode(Path.home()) not in text


def test_the_card_has_command_time_and_the_results_of_this_model_the_best_first(packed):
    card = zoo.read_card(packed)
    assert card.images == 80
    assert card.seconds > 0
    assert asked_for(card.command) == read_experiment(packed)
    results = read_results(packed / "metrics.json")
    assert [one.sampler for one in results] == ["ddim", "dpmpp_2m"]
    assert {one.provenance["model_sha256"] for one in results} == {card.trained_sha256}
    assert [score["metrics"]["FD-pixels"]["value"] for score in card.scores] == [20.0, 30.0]
    assert card.trained_sha256 != model_sha256(packed / "model")  # which has other weights


def test_a_card_and_a_picture_are_made_anew_and_the_rest_stays(packed, entry):
    """As after a change of the presets, which the command names, or of the bits of a seed."""
    before, card = contents(entry), rewrite_card(entry, title="Another.", command="nidiff train --preset gone")
    assert card == zoo.read_card(entry)
    assert script("pack_model")["main"](["--card", NAME, "--into", str(entry.parent), "--title", TITLE]) == 0
    assert contents(entry) == before == contents(packed)
    redraw(entry)
    assert contents(entry) == before
    rewrite_card(entry, picture=replace(zoo.read_card(entry).picture, seeds=(5, 6)))
    redraw(entry)
    changed = {name for name, sha256 in contents(entry).items() if sha256 != before[name]}
    assert changed == {"samples.png", "zoo.json", "model/README.md"}
    assert difference(entry) == 0


def test_only_a_finished_run_without_paths_is_packed_and_nothing_is_replaced_but_an_entry(run, tmp_path):
    picture = zoo.Picture(seeds=(0,), sampler="ddim", num_steps=2)
    about = {"title": "", "command": "", "seconds": None, "images": 1, "processor": "", "picture": picture}
    other = shutil.copytree(run, tmp_path / "run")
    values = json.loads((other / "experiment.json").read_text())
    for data in ("/home/somebody/digits.npz", "digits.npz", "photos/cats"):
        (other / "experiment.json").write_text(json.dumps(values | {"data": data}))
        with pytest.raises(InputError, match="names the path"):
            pack(other, tmp_path / "packed", **about)
    (other / "experiment.json").write_text(json.dumps(values))
    tuned = CHOICE._replace(facts={"data": "/home/somebody/digits.npz"})
    store_choices(other / "model" / SAMPLING, [tuned], model_sha256(other / "model"))
    with pytest.raises(InputError, match="names the path"):
        pack(other, tmp_path / "packed", **about)
    with refused("run"):
        pack(run / "model", tmp_path / "packed", **about)
    assert not (tmp_path / "packed").exists()
    (tmp_path / "mine").mkdir()
    with refused("destination"):
        pack(run, tmp_path / "mine", **about)


# By name -----------------------------------------------------------------------------------------------------------


def test_a_model_is_found_by_its_name_and_a_path_goes_before_it(entry, run):
    assert zoo.zoo_models()[NAME] == entry == zoo.find_model(NAME)
    denoiser = nidiff.load_model(NAME)
    assert torch.equal(denoiser.net.conv_in.weight, load_model(entry).net.conv_in.weight)
    pipeline = nidiff.NonIsotropicPipeline.from_pretrained(NAME)
    assert torch.equal(pipeline.unet.conv_in.weight, denoiser.net.conv_in.weight)
    os.symlink(run, NAME)
    assert zoo.find_model(NAME) == Path(NAME)
    assert not torch.equal(nidiff.load_model(NAME).net.conv_in.weight, denoiser.net.conv_in.weight)


def test_samplers_that_you_choose_for_a_shipped_model_stand_beside_those_that_came_with_it(entry):
    mine = [Choice(10, "heun", 5, {}), Choice(5, "euler", 5, {})]
    for choices, known in ((mine[:1], [CHOICE, mine[0]]), (mine, mine[::-1])):
        file = open_model(Path(NAME), CPU).sampling_file
        file.parent.mkdir(parents=True, exist_ok=True)
        store_choices(file, choices, model_sha256(entry / "model"))
        assert sorted(open_model(Path(NAME), CPU).denoiser.choices) == known


def test_an_unknown_name_lists_the_known_ones(entry, say):
    commands = [[name] for name in ("sample", "evaluate", "report", "likelihood", "verify", "models")]
    for words in (*commands, ["train", "--config"]):
        code, _, log = say(*words, "tiny-digit")
        assert code == 2
        assert f"did you mean {NAME!r}?" in log
        assert all(repr(name) in log for name in zoo.zoo_models())


def test_the_picture_of_a_model_of_classes_has_those_that_nidiff_sample_draws(say, tmp_path):
    path = zoo.zoo_models()["digits-classes"]
    picture, denoiser = zoo.read_card(path).picture, nidiff.load_model(path)
    drawn = draw_samples(denoiser, read_grid(path, (1, 8, 8), denoiser.scaling), picture, range(4)).movedim(1, -1)
    for classes, same in ((), True), (("--classes", "none"), False):
        out = tmp_path / f"out{len(classes)}"
        code, _, _ = say("sample", str(path), "--seeds", "0-3", *classes, "--format", "npy", "--out", str(out))
        assert code == 0
        assert np.array_equal(np.load(out / "samples.npy"), drawn.numpy()) == same


def test_sampling_by_name_repeats_the_picture_and_writes_nothing_into_the_entry(entry, say):
    before = contents(entry)
    code, out, log = say("sample", NAME, "--seeds", "0-4")
    assert code == 0
    folder = Path(out.strip())
    assert folder.parts[:3] == ("out", NAME, "generated")
    assert str(folder / "grid.png") in log
    assert (folder / "grid.png").read_bytes() == (entry / "samples.png").read_bytes()
    code, out, _ = say("evaluate", NAME, "--seeds", "0-4", "--features", "pixels", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["sampler"], found["num_steps"], found["run"]) == ("dpmpp_2m", 3, NAME)
    assert len(read_results(Path("out") / NAME / "metrics.json")) == 1
    drawing = ("--samplers", "ddim", "--num-steps", "2", "--seeds", "0-4", "--features", "pixels", "--bootstrap", "0")
    code, out, _ = say("table", NAME, *drawing)
    assert code == 0
    assert NAME in out
    assert len(read_results(Path("out") / NAME / "metrics.json")) == 2
    assert {path.name for path in Path().iterdir()} == {"out"}
    assert contents(entry) == before


def test_by_its_path_too_an_entry_is_only_read_and_a_run_keeps_its_results(entry, run):
    training = parse(Train, ["--config", NAME], prog="", default=Train.defaults(["--config", NAME]))
    assert training.directory().folder == Path("runs") / NAME
    model = open_model(entry / "model", CPU)
    assert (model.home, model.path) == (Path("out") / NAME, entry)
    assert plan_job(model).num_steps == 3
    assert plan_job(model, "ddim").num_steps == 20
    assert plan_job(model, num_steps=7).num_steps == 7
    model = open_model(run, CPU)
    assert model.home == run
    assert (plan_job(model).sampler, plan_job(model).num_steps) == ("dpmpp_2m", 3)  # as it was trained


# Changed files -----------------------------------------------------------------------------------------------------


FILES = ("samples.png", "experiment.json", "metrics.json", "zoo.json", "model/data.json", "model/unet/config.json")
FILES += ("model/unet/diffusion_pytorch_model.safetensors", "model/scheduler/scheduler_config.json")


def test_a_changed_or_missing_file_is_refused(entry, say):
    for file in FILES:
        nidiff.load_model(NAME)  # as it is, it opens
        path = entry / file
        content, middle = path.read_bytes(), path.stat().st_size // 2
        path.unlink()
        with pytest.raises(InputError):
            nidiff.load_model(NAME)
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(InputError):
            nidiff.load_model(NAME)
        if "/" not in file:
            assert say("models")[0] == say("train", "--config", NAME, "--dry-run")[0] == 2
        path.write_bytes(content)


def test_what_ships_is_never_accepted_as_it_is(entry, say):
    """Verifying may rewrite the checksums of any other model: here they would no longer say what was packed."""
    file = entry / "model/unet/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    before = contents(entry)
    for path in (NAME, entry / "model"):
        assert say("verify", "--accept", path)[0] == 2
    assert contents(entry) == before
    with pytest.raises(FileError, match="install nidiff again"):
        nidiff.load_model(NAME)


# nidiff models -----------------------------------------------------------------------------------------------------


def test_models_are_listed_drawn_and_described_in_words_and_in_json(entry, say):
    code, out, _ = say("models", NAME)
    assert code == 0
    card = zoo.read_card(entry)
    assert all(word in out for word in (TITLE, card.command, f"nidiff sample {NAME} --seeds 0-4"))
    assert json.loads(say("models", NAME, "--json")[1])["command"] == card.command
    assert not Path("out").exists()  # only the list draws
    code, out, _ = say("models")
    assert code == 0
    assert TITLE in next(line for line in out.splitlines() if line.startswith(NAME))
    with Image.open("out/models.png") as sheet:
        assert min(sheet.size) > 200
        assert len(set(sheet.convert("L").tobytes())) > 20  # it is not blank
    code, out, _ = say("models", "--json", "--out", "here.png")
    assert {one["name"]: one for one in json.loads(out)}[NAME] == json.loads(json.dumps(described(entry)))
    assert Path("here.png").is_file()
    assert say("models", "--out", "models.txt")[0] == 2


# Commands and pictures ---------------------------------------------------------------------------------------------

OTHER = replace(
    PRESETS["fashion-mnist"],
    flip=False,
    attention=(),
    data=DataSpec("my data's.npz", variables=("a b", "c")),
    num_steps=7,
    learning_rate=1e-05,
)


def test_the_command_of_an_experiment_trains_it_and_names_only_what_differs():
    for experiment in (*PRESETS.values(), OTHER, replace(OTHER, num_steps=None, flip=True)):
        assert asked_for(experiment.command()) == experiment
    preset = PRESETS["cifar10-ddpm"]
    experiment = replace(preset, seed=3, data=replace(preset.data, data_dir=Path("/somewhere")))
    assert experiment.command() == "nidiff train --preset cifar10-ddpm --seed 3"


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_the_picture_of_fields_can_be_read_as_numbers(shift, tmp_path):
    """Within half a level of the values, and the limits hold nearly all of them."""
    grid = Grid.usual((2, 6, 10), "float32")
    units = torch.tensor([1.0, 30.0]).view(2, 1, 1)
    data = (torch.randn(5, 2, 6, 10, generator=torch.Generator().manual_seed(0)) + shift) * units
    limits = limits_of(data, grid)
    levels = as_levels(data, grid, limits)
    save_picture(data, grid, limits, tmp_path / "fields.png")
    assert torch.equal(read_levels(tmp_path / "fields.png", levels, grid, 5), levels)
    for channel, (low, high) in enumerate(limits):
        assert (low == -high) == (shift == 0.0)
        shown = low + levels[:, 0, :, channel * 10 : (channel + 1) * 10].double() / 254 * (high - low)
        assert (shown - data[:, channel].clamp(low, high)).abs().max() <= 0.501 * (high - low) / 254
    with pytest.raises(FileError, match="pixels"):
        read_levels(tmp_path / "fields.png", levels, grid, 12)
    with pytest.raises(InputError, match="signals"):
        limits_of(torch.zeros(2, 1, 9), Grid.usual((1, 9), "float32"))


# A light install -----------------------------------------------------------------------------------------------------


def test_a_model_whose_network_is_ours_is_sampled_without_any_extra_and_without_diffusers(tmp_path):
    """Importing diffusers takes as long as everything else together."""
    code = """
from nidiff.cli import main
assert main(["sample", "fashion-mnist", "--seeds", "0", "--num-steps", "2", "--out", sys.argv[2]]) == 0
heavy = ("diffusers", "accelerate", "matplotlib", "xarray", "torch._dynamo", "torch")
print([name for name in heavy if name in sys.modules])
"""
    done = without(EXTRAS, code, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['torch']"
    assert (tmp_path / "out" / "grid.png").is_file()
