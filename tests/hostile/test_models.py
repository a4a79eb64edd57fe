"""Models, samples and results that were damaged, or that a stranger made: a sentence or the same bits, never code."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CASES
from PIL import Image
from problems import refused
from safetensors.torch import save_file

import nidiff
from nidiff.cli import main
from nidiff.diffusion.gaussian import Kappa
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError
from nidiff.evaluation.evaluator import open_evaluator
from nidiff.evaluation.features import load_features
from nidiff.evaluation.results import Measured, Result, known_results, remember
from nidiff.generation.folder import SampleFolder
from nidiff.generation.job import Job
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.card import escaped, model_card, python_text
from nidiff.model.folder import load_model, save_model
from nidiff.model.network import unet2d
from nidiff.training.experiment import Experiment
from nidiff.training.identity import settings_digest

IDENTITY = dict(zip(("settings", "process", "data", "network"), ("1" * 64, "2" * 64, "3" * 64, "4" * 64), strict=True))
CARD = "README.md"  # text that people edit


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, label):
        return torch.tanh(self.layer(x)) + 0.01 * label.reshape(-1, 1, 1, 1)


def denoiser(net, seed: int = 0) -> nidiff.Denoiser:
    data = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    process = nidiff.Process(nidiff.schedules.ddpm_linear(9 + seed), nidiff.from_data(data))  # Σ has arrays
    gaussian = nidiff.fit_gaussian(data, basis=process.covariance)
    half = torch.full((2, 1, 4, 4), 0.5)
    kappa = Kappa(torch.tensor([0.0, 8.0 + seed], dtype=torch.float64), half, half)
    options = {"clip": 1.0, "scaling": PIXELS, "gaussian": gaussian, "kappa": kappa}
    return nidiff.Denoiser(net, process, "eps" if seed else "v", **options)


def network(kind: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Own() if kind == "own" else unet2d((1, 4, 4), widths=(8,), layers=1, attention=())


def samples(folder: Path, kind: str) -> torch.Tensor:
    """What the model makes: all of it is in these bits."""
    model = load_model(folder, net=Own() if kind == "own" else None)
    assert (model.clip, model.scaling) == (1.0, PIXELS)
    return nidiff.sample(model, (2, 1, 4, 4), sampler="angle_2m", num_steps=3, generator=[0, 1])


Saved = tuple[str, Path, Path, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Saved]:
    """By the kind of network: the kind, a model, another one with the same files, and the samples of the first."""
    found = {}
    for kind in ("own", "unet"):
        root = tmp_path_factory.mktemp(kind)
        for seed, name in enumerate(("mine", "other")):
            save_model(denoiser(network(kind, seed), seed), root / name)
        found[kind] = kind, root / "mine", root / "other", samples(root / "mine", kind)
    return found


@pytest.fixture(params=["own", "unet"])
def saved(request, models) -> Saved:
    return models[request.param]


@pytest.fixture
def own(models) -> Saved:
    return models["own"]


# Damage ----------------------------------------------------------------------------------------------------------

DEEP, LONG = 100_000, (400, 5000)
NUMBERS, WORDS = [None, True, 0, -1, 10**18, 1e300], ["", "x" * 300, "\x00", "../../etc/passwd"]
VALUES = [*NUMBERS, *WORDS, [], [[]], {}, {"a": {}}, ["a", 1]]


def bombs(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """JSON that is not what it was: too deep, too long, infinite, of other types, with keys twice."""
    yield b"[" * DEEP + b"]" * DEEP
    yield b'{"a":' * DEEP + b"1" + b"}" * DEEP
    yield from (b"9" * digits for digits in LONG)
    yield from (b"[" * depth + b"]" * depth for depth in (300, 900, 990, 1100))
    values = json.loads(content)
    paths = list(_places(values))
    for _ in range(6 * CASES if CASES > 1 else 3):
        place, path = values, draw.choice(paths)
        changed = json.loads(content)
        place = changed
        for key in path[:-1]:
            place = place[key]
        if path:
            place[path[-1]] = draw.choice(VALUES)
        else:
            changed = draw.choice(VALUES)
        yield json.dumps(changed).encode()
        if path:
            place[path[-1]] = "HERE"
            text = json.dumps(changed).encode()
            for word in (b"Infinity", b"-Infinity", b"NaN", b"1e999", b"9" * draw.choice(LONG)):
                yield text.replace(b'"HERE"', word)
            nested = b"[" * 500 + b"]" * 500
            yield text.replace(b'"HERE"', nested)
    yield b'{"_class_name": 1, ' + content.lstrip()[1:] if content.lstrip()[:1] == b"{" else b"[1]"


def _places(values: object, path: tuple = ()) -> Iterator[tuple]:
    yield path
    children = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in children:
        yield from _places(value, (*path, key))


def damages(file: Path, twin: Path | None, draw: random.Random) -> Iterator[bytes | None]:
    """The contents that a file is given; None: it is deleted."""
    content = file.read_bytes()
    for _ in range(8 * CASES if CASES > 1 else 4):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        yield bytes(flipped)
    for _ in range(2 * CASES):
        yield content[: draw.randrange(len(content))]
    yield from (b"", content + b"\0", None, draw.randbytes(len(content)))
    if twin is not None and twin.read_bytes() != content:
        yield twin.read_bytes()
    if file.suffix == ".json":
        yield from bombs(content, draw)


def outcome(act: Callable[[], object], same: Callable[[object], bool]) -> str | None:
    """What is wrong with how it ended; None if it was one sentence, or the same as before."""
    try:
        found = act()
    except InputError as error:
        text = str(error)
        return None if "\n" not in text and len(text) < 1500 else f"not a sentence: {text[:300]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if same(found) else "another result, silently"


def try_all(folder: Path, twin: Path, files: list[str], act, same, kind: str, tally) -> None:
    """Every damage of every file, one at a time; each is repaired before the next."""
    draw, wrong, tried = random.Random(kind), [], 0
    for name in files:
        file, whole = folder / name, (folder / name).read_bytes()
        for content in damages(file, twin / name if (twin / name).exists() else None, draw):
            if content == whole:
                continue
            if content is None:
                file.unlink()
            else:
                file.write_bytes(content)
            tried += 1
            if problem := outcome(act, same):
                wrong.append(f"{name} {'deleted' if content is None else content[:80]!r}: {problem}")
            file.write_bytes(whole)
    assert outcome(act, same) is None  # the repaired one is as before
    tally(kind, tried, len(wrong))
    assert not wrong, "\n".join(wrong[:5])


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.filterwarnings("ignore")  # of torch and numpy, on odd values
def test_a_damaged_model_is_refused_or_the_same(saved, tmp_path, tally):
    kind, mine, twin, expected = saved
    folder = shutil.copytree(mine, tmp_path / "m")
    files = [name for name in files_of(folder) if name != CARD]
    assert {"manifest.json", "scheduler/scheduler_config.json", "scheduler/covariance.safetensors"} <= {*files}
    assert "scheduler/gaussian.safetensors" in files
    act, same = partial(samples, folder, kind), partial(torch.equal, expected)
    try_all(folder, twin, files, act, same, "damaged model", tally)
    (folder / CARD).write_bytes(b"\xff\x00")
    assert torch.equal(samples(folder, kind), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_model_without_checksums_never_raises_anything_else(saved, tmp_path, tally):
    """As diffusers writes them: what is changed so that it still opens cannot be noticed."""
    kind, mine, twin, _ = saved
    folder = shutil.copytree(mine, tmp_path / "m")
    (folder / "manifest.json").unlink()
    files = [name for name in files_of(folder) if name.endswith(("config.json", "index.json", "gaussian.safetensors"))]
    act = [lambda: load_model(folder, net=Own() if kind == "own" else None)]
    if kind == "unet":
        act.append(lambda: NonIsotropicPipeline.from_pretrained(folder))
        act.append(lambda: NonIsotropicScheduler.from_pretrained(folder / "scheduler"))
    for one in act:
        try_all(folder, twin, files, one, lambda _: True, "damaged model without checksums", tally)


def test_added_files_change_nothing_or_are_refused(saved, tmp_path, tally):
    kind, mine, twin, expected = saved
    part = "network" if kind == "own" else "unet"
    weights = next((twin / part).glob("*.safetensors"))
    index = {"metadata": {}, "weight_map": {"layer.weight": "evil.safetensors"}}
    added = {
        f"{part}/extra.safetensors": weights.read_bytes(),
        f"{part}/evil.py": b"raise SystemExit",
        f"{part}/diffusion_pytorch_model.bin": b"bin",
        f"{part}/diffusion_pytorch_model.safetensors.index.json": json.dumps(index).encode(),
        f"{part}/diffusion_pytorch_model-00001-of-00001.safetensors": weights.read_bytes(),
        "scheduler/covariance.json": b"{}",
        "evil.py": b"raise SystemExit",
        "pipeline.py": b"raise SystemExit",
        "covariance.json": b'{"covariance": "Identity", "shape": [4, 4]}',
    }
    wrong = []
    for has_manifest in (True, False):
        for name, content in added.items():
            folder = shutil.copytree(mine, tmp_path / f"{has_manifest}-{name.replace('/', '-')}")
            if not has_manifest:
                (folder / "manifest.json").unlink()
            (folder / name).write_bytes(content)
            if problem := outcome(partial(samples, folder, kind), partial(torch.equal, expected)):
                wrong.append(f"{name}: {problem}")
            if has_manifest and "/" in name:
                with pytest.raises(InputError, match="was added to the model"):
                    samples(folder, kind)
    tally("files added to a model", 2 * len(added), len(wrong))
    assert not wrong


def test_a_change_on_purpose_is_accepted_by_a_command(own, tmp_path, capsys):
    kind, mine, _, expected = own
    folder = shutil.copytree(mine, tmp_path / "m")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"clip_sample_range": 1.0', '"clip_sample_range": 0.5'))
    assert main(["verify", str(folder)]) == 2
    assert "nidiff verify --accept" in capsys.readouterr().err
    assert main(["verify", str(folder), "--accept"]) == 0
    model = load_model(folder, net=Own() if kind == "own" else None)
    assert model.clip == 0.5
    assert not torch.equal(nidiff.sample(model, (2, 1, 4, 4), num_steps=3, generator=[0, 1]), expected)
    config.write_text("{")
    assert main(["verify", str(folder), "--accept"]) == 2  # what does not open is not accepted
    assert "scheduler_config.json" in capsys.readouterr().err


def test_a_model_belongs_to_its_run(own, tmp_path, capsys):
    kind, mine, _, expected = own
    run, model = tmp_path / "run", denoiser(network(kind))
    whole = {**IDENTITY, "settings": settings_digest(Experiment())}
    save_model(model, run / "model", run=whole)
    experiment = {**Experiment().to_json(), "identity": whole}
    (run / "experiment.json").write_text(json.dumps(experiment))
    assert torch.equal(samples(run, kind), expected)
    assert torch.equal(samples(shutil.copytree(run / "model", tmp_path / "alone"), kind), expected)
    for identity in ({**whole, "data": "0" * 64}, {}, {"settings": 1}, [], "x", None):
        (run / "experiment.json").write_text(json.dumps({**experiment, "identity": identity}))
        with pytest.raises(InputError, match="another run|damaged identity|version 0.2"):
            samples(run, kind)
    (run / "experiment.json").write_text(json.dumps(experiment))
    shutil.rmtree(run / "model")
    shutil.copytree(mine, run / "model")  # a whole model, of no run
    with pytest.raises(InputError, match="another run"):
        samples(run / "model", kind)
    (run / "model" / "manifest.json").unlink()
    with pytest.raises(InputError, match="manifest.json"):
        samples(run, kind)
    assert main(["verify", "--accept", str(run / "model")]) == 0
    assert torch.equal(samples(run, kind), expected)


@pytest.mark.parametrize("value", [None, True, -1, "x", [], {}, ["a"], 1e308])
def test_a_network_is_tried_before_it_is_used(value, tmp_path):
    """Arguments that its class looks at only when it is called: it works, or the file is named."""
    save_model(denoiser(network("unet")), tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    file = tmp_path / "m" / "unet" / "config.json"
    config = json.loads(file.read_text())
    for key in ("norm_eps", "freq_shift", "mid_block_scale_factor", "norm_num_groups", "attention_head_dim"):
        file.write_text(json.dumps(config | {key: value}))
        with contextlib.suppress(InputError):
            nidiff.sample(load_model(tmp_path / "m"), (1, 1, 4, 4), num_steps=2, generator=[0])


def test_a_kill_between_two_renames_leaves_a_model_that_opens(own, tmp_path):
    kind, _, _, expected = own
    for place in ("m", "run/model"):
        folder, run = tmp_path / place, IDENTITY if place == "run/model" else None
        save_model(denoiser(network(kind)), folder.with_name(f".replaced-{folder.name}"), run=run)
        if run is not None:
            (tmp_path / "run" / "experiment.json").write_text(json.dumps({"identity": run}))
        assert torch.equal(samples(tmp_path / place.split("/")[0], kind), expected)
        assert torch.equal(samples(folder, kind), expected)
        save_model(denoiser(network(kind)), folder, run=run)
        assert [path.name for path in folder.parent.glob(".replaced-*")] == []
        assert torch.equal(samples(folder, kind), expected)


def test_names_that_are_long_or_not_utf_8(saved, tmp_path, tally):
    """They work wherever the system takes them, and are one sentence elsewhere."""
    kind, _, _, expected = saved
    names = [b"\xff\xfe", "Σ ß 日本".encode(), b"a b'c\"d", b"n" * 250, b"n" * 255, b"n" * 300, b"line\none", b"-x"]
    wrong = []
    for name in names:
        folder = tmp_path / os.fsdecode(name)
        if problem := outcome(
            lambda f=folder: (save_model(denoiser(network(kind)), f), samples(f, kind))[1],
            partial(torch.equal, expected),
        ):
            wrong.append(f"{name!r}: {problem}")
        if kind == "unet" and folder.parent.is_dir():
            flags = ["--seeds", "0-1", "--num-steps", "2", "--out", str(tmp_path / "out") + os.fsdecode(name)]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                if (code := main(["sample", str(folder), *flags])) not in (0, 2):
                    wrong.append(f"{name!r}: exit {code}")
    assert torch.equal(samples(tmp_path / os.fsdecode(names[0]), kind), expected)
    tally("odd names", len(names), len(wrong))
    assert not wrong


# Samples and results ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and a folder of its samples in both formats."""
    root = tmp_path_factory.mktemp("drawn")
    save_model(denoiser(network("unet")), root / "model")
    for name, seeds in (("mine", "0-3"), ("other", "4-7")):
        flags = ["--seeds", seeds, "--num-steps", "3", "--format", "both"]
        assert main(["sample", str(root / "model"), "--out", str(root / name), *flags]) == 0
    return root / "model", root / "mine"


@pytest.mark.filterwarnings("ignore")
def test_damaged_samples_are_refused_or_drawn_again(drawn, tmp_path, tally, capsys):
    """After the command they are the same, or it said a sentence; damaged pictures are always repaired."""
    _, mine = drawn
    folder = shutil.copytree(mine, tmp_path / "s")
    job = Job(**json.loads((mine / "job.json").read_text())["job"])
    expected = SampleFolder(mine, job, (1, 4, 4)).read([0, 1, 2, 3])

    def again() -> torch.Tensor:
        whole = SampleFolder(folder, job, (1, 4, 4), "both")
        whole.check()
        if whole.missing([0, 1, 2, 3]):
            return expected  # they would be drawn
        whole.finish([0, 1, 2, 3])
        for seed, image in enumerate(expected):
            with Image.open(folder / "png" / f"{seed:06d}.png") as picture:
                assert np.array_equal(np.asarray(picture), image[0])
        return whole.read([0, 1, 2, 3])

    files = ["job.json", "samples.npz", "png/000001.png", "grid.png"]
    same = lambda found: torch.equal(found, expected)  # noqa: E731
    try_all(folder, drawn[1].parent / "other", files, again, same, "damaged samples", tally)


@pytest.mark.parametrize("part", ["png", "parts"])
def test_a_link_in_a_folder_of_samples_leads_to_no_file_of_ours(part, drawn, tmp_path, capsys):
    model, mine = drawn
    folder = shutil.copytree(mine, tmp_path / "s", ignore=shutil.ignore_patterns(part))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "000000.png").write_text("mine")
    (folder / part).symlink_to(tmp_path / "precious")
    flags = ["--seeds", "0-5", "--num-steps", "3", "--format", "both"]
    assert main(["sample", str(model), "--out", str(folder), *flags]) == 2
    assert part in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "precious").iterdir()] == ["mine"]


def test_two_that_save_one_model_take_turns(tmp_path):
    """In the folder is always one of them, whole."""

    def save(value: float) -> None:
        net = network("own")
        for parameter in net.parameters():
            torch.nn.init.constant_(parameter, value)
        for _ in range(10):
            save_model(denoiser(net), tmp_path / "m")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, (1.0, 2.0)))
    loaded = load_model(tmp_path / "m", network("own")).net
    assert torch.cat([parameter.detach().flatten() for parameter in loaded.parameters()]).unique().numel() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.filterwarnings("ignore")
def test_damaged_results_are_refused_or_the_same(tmp_path, tally):
    for name, value in (("mine", 7.25), ("other", 8.5)):
        (tmp_path / name).mkdir()
        for steps in (3, 5):
            metrics = {"FD-pixels": Measured(value, 0.125), "recall": Measured(0.5, None, True)}
            provenance = {"features": "pixels", "num_real": 50, "real_sha256": name * 8}
            remember(
                tmp_path / name, Result(name, "ddim", steps, "uniform", {"eta": 0.5}, "0-29", 1.0, metrics, provenance)
            )
    expected = known_results(tmp_path / "mine")
    content = json.loads((tmp_path / "mine" / "metrics.json").read_text())
    fewer = [expected[:1], expected[1:], []]  # a list from which one was taken is whole
    other = known_results(tmp_path / "other")
    same = lambda found: found in (expected, *fewer, other) or found == expected  # noqa: E731
    assert len(content) == 2
    act = partial(known_results, tmp_path / "mine")
    try_all(tmp_path / "mine", tmp_path / "other", ["metrics.json"], act, same, "damaged results", tally)


# A stranger's model ----------------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path, monkeypatch) -> Path:
    """A marker that any code of the stranger's would leave; here is what such code would be."""
    marker = tmp_path / "sprung"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return marker


def strangers_folder(place: Path, marker: Path) -> Path:
    """A model that opens, with programs wherever diffusers, transformers or Python might look for them."""
    save_model(denoiser(network("unet")), place)
    (place / "manifest.json").unlink()
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass UNet2DModel: pass\nX = UNet2DModel\n"
    names = ("evil", "pipeline", "unet", "scheduler", "modeling", "__init__", "diffusers", "my_pipeline", "hubconf")
    for folder in (place, place / "unet", place / "scheduler", place / "evil"):
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / f"{name}.py").write_text(code)
    return place


INDEXES = {
    "a module": {"unet": ["evil", "X"]},
    "a module in a folder": {"unet": ["unet.evil", "X"], "scheduler": ["scheduler.evil", "X"]},
    "a scheduler": {"scheduler": ["scheduler", "X"]},
    "a pipeline": {"_class_name": ["pipeline", "X"]},
    "a pipeline in a folder": {"_class_name": ["unet/evil", "X"]},
    "a word": {"_class_name": "evil"},
    "another component": {"safety_checker": ["evil", "X"], "evil": ["evil", "X"]},
    "a class of diffusers": {"unet": ["diffusers", "DiffusionPipeline"]},
    "three": {"unet": ["diffusers", "UNet2DModel", "evil"]},
    "of the system": {"unet": ["os", "system"], "scheduler": ["subprocess", "Popen"]},
    "nothing": {},
}
CONFIGS = {
    "auto_map": {"auto_map": {"AutoModel": "evil.X"}},
    "a class": {"_class_name": "X"},
    "a class in a list": {"_class_name": ["evil", "UNet2DModel"]},
    "another place": {"_name_or_path": "stranger/evil"},
    "quantised": {"quantization_config": {"quant_method": "evil", "load_in_4bit": True}},
    "a module": {"_module": "evil", "_library": "evil"},
    "an activation": {"act_fn": "__import__('os').system"},
    "a block": {"down_block_types": ["evil.X"]},
    "huge": {"block_out_channels": [8 * 10**9]},
    "many": {"layers_per_block": 10**12},
    "long": {"down_block_types": ["DownBlock2D"] * 10**5},
}


@pytest.mark.filterwarnings("ignore")
def test_a_strangers_code_is_never_run(trap, tmp_path, tally, monkeypatch):
    """Whatever the files name, no module is imported, and the folder gives its own network or a sentence."""
    place = strangers_folder(tmp_path / "m", trap)
    monkeypatch.chdir(place)  # where `import evil` would find it
    monkeypatch.syspath_prepend(str(place / "evil"))
    index, config, scheduler = (
        place / name for name in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json")
    )
    before = {file: json.loads(file.read_text()) for file in (index, config, scheduler)}
    cases = [(index, change) for change in INDEXES.values()]
    cases += [(file, change) for file in (config, scheduler) for change in CONFIGS.values()]
    acts = {
        "pipeline": lambda: NonIsotropicPipeline.from_pretrained(place),
        "pipeline with a scheduler": lambda: NonIsotropicPipeline.from_pretrained(place, scheduler=own),
        "scheduler": lambda: NonIsotropicScheduler.from_pretrained(place, subfolder="scheduler"),
        "model": lambda: load_model(place),
    }
    own, wrong, tried = NonIsotropicScheduler.from_pretrained(place / "scheduler"), [], 0
    NonIsotropicPipeline.from_pretrained(place)  # all that is needed has been imported
    modules = set(sys.modules)
    for file, change in cases:
        file.write_text(json.dumps({**before[file], **change}))
        for name, act in acts.items():
            tried += 1
            if problem := outcome(act, lambda _: True):
                wrong.append(f"{name}, {file.name} {change}: {problem}")
        file.write_text(json.dumps(before[file]))
    for option in ("custom_pipeline", "trust_remote_code", "custom_revision", "device_map", "unet", "variant"):
        tried += 1
        value = str(place / "pipeline.py") if option == "custom_pipeline" else True
        with refused(option):
            NonIsotropicPipeline.from_pretrained(place, **{option: value})
    new = {name for name in set(sys.modules) - modules if not name.startswith(("torch", "diffusers", "numpy"))}
    tally("a stranger's code", tried, len(wrong) + trap.exists() + bool(new))
    assert not trap.exists()
    assert not new
    assert not wrong, "\n".join(wrong[:5])
    exec(compile((place / "evil.py").read_text(), "evil", "exec"), {})
    assert trap.exists()  # the trap works


def test_programs_are_not_fetched_from_the_hub():
    from fnmatch import fnmatch

    from nidiff.interop.pipeline import FILES

    for name in ("model_index.json", "manifest.json", "unet/config.json", "unet/x.safetensors", "scheduler/x.json"):
        assert any(fnmatch(name, pattern) for pattern in FILES), name
    for name in ("pipeline.py", "unet/evil.py", "unet/x.bin", "scheduler/evil.py", "x.pkl", "unet/x.ckpt", "unet/x.pt"):
        assert not any(fnmatch(name, pattern) for pattern in FILES), name


def test_a_program_of_features_needs_trust(tmp_path):
    for suffix in (".pt", ".pt2", ".ts", ".torchscript"):
        (tmp_path / f"mine{suffix}").write_bytes(b"anything")
        for act in (load_features, lambda file: open_evaluator(tmp_path, torch.zeros(9, 1, 4, 4), features=file)):
            with pytest.raises(InputError, match="is a program"):
                act(tmp_path / f"mine{suffix}")


NAMES = [
    'x")\nimport os; os.system("evil")#',
    "a | b | c",
    "```\n<script>alert(1)</script>\n```",
    "<img src=x onerror=alert(1)>",
    "![x](http://evil/track.png)",
    "[x](javascript:alert(1))",
    "line\none\r\ntwo\u2028three\x85four",
    "\\",
    '"""',
    "nul\x00bell\x07escape\x1b[31m",
    "not UTF-8 \udcff\udc80",
    "half of a pair \ud800",
    "\u202egnp.exe",
    "`code`",
    "$(evil) {name} %s {0}",
    "Ünïcödé 日本語 🎲",
]


def test_a_card_is_text_whatever_is_in_its_names(tmp_path, tally):
    """One row per fact, no markup, and a sample of code that is one string."""
    plain = denoiser(network("unet"))
    for number, name in enumerate(NAMES):
        assert eval(python_text(name)) == name
        assert "\n" not in python_text(name)
        assert "`" not in python_text(name)
        facts = {"schedule": "ddpm_linear:num_levels=9", "prediction_type": name}
        card = model_card(plain.process.covariance, facts, {"data": name, name: "x"}, name)
        usual = model_card(plain.process.covariance, facts | {"prediction_type": "x"}, {"data": "x", "y": "x"}, "x")
        assert len(card.splitlines()) == len(usual.splitlines()), name
        unescaped = re.sub(r"`[^`\n]*`|\\[|<\[`]", "", card)
        rows = [line for line in unescaped.splitlines() if line.startswith("|")]
        assert {row.count("|") for row in rows} == {3}
        assert "<script" not in unescaped
        assert "<img" not in unescaped
        assert "[x]" not in unescaped
        assert card.count("```") == 2
        card.encode()  # it is UTF-8
        save_model(plain, tmp_path / str(number), {"data": name})
        assert escaped(name) in (tmp_path / str(number) / CARD).read_text(encoding="utf-8")
    tally("names in a card", len(NAMES), 0)


def test_weights_of_other_kinds_are_refused(tmp_path):
    model = denoiser(network("own"))
    save_model(model, tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    file = tmp_path / "m" / "network" / "weights.safetensors"
    save_file({name: tensor.long() for name, tensor in model.net.state_dict().items()}, file)
    with pytest.raises(InputError, match="torch.int64"):
        load_model(tmp_path / "m", net=Own())
