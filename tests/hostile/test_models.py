"""Models, samples and results that were damaged, or that a stranger made: a sentence or the same bits, never code."""

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import CASES
from problems import refused

import nidiff
from nidiff.cli import main
from nidiff.diffusion.gaussian import Kappa
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError
from nidiff.files import REPLACED, marked
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.interop.pipeline import FILES
from nidiff.model.card import escaped, model_card, python_text
from nidiff.model.folder import load_model, save_model
from nidiff.model.network import unet2d
from nidiff.training.experiment import Experiment
from nidiff.training.identity import settings_digest


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


# Damage ----------------------------------------------------------------------------------------------------------

VALUES = [None, True, 0, -1, 10**18, 1e300, "", "x" * 300, "\x00", "../../etc/passwd", [], [[]], {"a": {}}, ["a", 1]]


def edits(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """JSON of other types, with numbers that are none, and with keys twice."""
    paths = [path for path in _places(json.loads(content)) if path]
    for _ in range(2 * CASES):
        changed, path = json.loads(content), draw.choice(paths)
        place = changed
        for key in path[:-1]:
            place = place[key]
        for value in draw.sample(VALUES, 3):
            place[path[-1]] = value
            yield json.dumps(changed).encode()
        place[path[-1]] = "HERE"
        for word in (b"-Infinity", b"NaN", b"1e999", b"9" * 400, b"[" * 500 + b"]" * 500):
            yield json.dumps(changed).encode().replace(b'"HERE"', word)
    yield from (json.dumps(value).encode() for value in VALUES)
    yield b'{"_class_name": 1, ' + content.lstrip()[1:]


def _places(values: object, path: tuple = ()) -> Iterator[tuple]:
    yield path
    children = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in children:
        yield from _places(value, (*path, key))


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


@pytest.mark.filterwarnings("ignore")  # of torch and numpy, on odd values
def test_a_damaged_model_without_checksums_never_raises_anything_else(saved, tmp_path, tally):
    """As diffusers writes them: what is changed so that it still opens cannot be noticed. With checksums it is."""
    kind, mine, other, _ = saved
    folder = shutil.copytree(mine, tmp_path / "m")
    (folder / "manifest.json").unlink()
    acts = [lambda: load_model(folder, net=Own() if kind == "own" else None)]
    if kind == "unet":
        acts.append(lambda: NonIsotropicPipeline.from_pretrained(folder))
        acts.append(lambda: NonIsotropicScheduler.from_pretrained(folder / "scheduler"))
    draw, wrong, tried = random.Random(kind), [], 0
    for file in [path for path in sorted(folder.rglob("*.*")) if path.suffix in (".json", ".safetensors")]:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        damaged = [bytes(flipped), whole[: draw.randrange(len(whole))], b"", draw.randbytes(len(whole))]
        damaged.append((other / file.relative_to(folder)).read_bytes())
        damaged += edits(whole, draw) if file.suffix == ".json" else []
        for content in damaged:
            file.write_bytes(content)
            for act in acts:
                tried += 1
                if problem := outcome(act, lambda _: True):
                    wrong.append(f"{file.name} {content[:80]!r}: {problem}")
        file.write_bytes(whole)
    assert all(outcome(act, lambda _: True) is None for act in acts)  # the repaired one
    tally("damaged model without checksums", tried, len(wrong))
    assert not wrong, "\n".join(wrong[:5])


def test_added_files_change_nothing_or_are_refused(saved, tmp_path):
    kind, mine, twin, expected = saved
    part = "network" if kind == "own" else "unet"
    weights = next((twin / part).glob("*.safetensors"))
    index = {"metadata": {}, "weight_map": {"layer.weight": "evil.safetensors"}}
    added = {
        f"{part}/extra.safetensors": weights.read_bytes(),
        f"{part}/diffusion_pytorch_model.bin": b"bin",
        f"{part}/diffusion_pytorch_model.safetensors.index.json": json.dumps(index).encode(),
        f"{part}/diffusion_pytorch_model-00001-of-00001.safetensors": weights.read_bytes(),
        "scheduler/covariance.json": b"{}",
        "evil.py": b"raise SystemExit",
        "covariance.json": b'{"covariance": "Identity", "shape": [4, 4]}',
    }
    wrong = []
    for name, content in added.items():
        folder = shutil.copytree(mine, tmp_path / name.replace("/", "-"))
        (folder / name).write_bytes(content)
        if "/" in name:
            with pytest.raises(InputError, match="was added"):
                samples(folder, kind)
        for _ in range(2):  # with the manifest, and without
            if problem := outcome(partial(samples, folder, kind), partial(torch.equal, expected)):
                wrong.append(f"{name}: {problem}")
            (folder / "manifest.json").unlink(missing_ok=True)
    assert not wrong


def test_a_change_on_purpose_is_accepted_by_a_command(models, tmp_path, capsys):
    _, mine, _, expected = models["own"]
    folder = shutil.copytree(mine, tmp_path / "m")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"clip_sample_range": 1.0', '"clip_sample_range": 0.5'))
    assert main(["verify", str(folder)]) == 2
    assert "nidiff verify --accept" in capsys.readouterr().err
    assert main(["verify", str(folder), "--accept"]) == 0
    model = load_model(folder, net=Own())
    assert model.clip == 0.5
    assert not torch.equal(nidiff.sample(model, (2, 1, 4, 4), num_steps=3, generator=[0, 1]), expected)
    config.write_text("{")
    assert main(["verify", str(folder), "--accept"]) == 2  # what does not open is not accepted
    assert "scheduler_config.json" in capsys.readouterr().err


def test_a_model_belongs_to_its_run(models, tmp_path):
    kind, mine, _, expected = models["own"]
    run, model = tmp_path / "run", denoiser(network(kind))
    whole = {**dict.fromkeys(("process", "data", "network"), "1" * 64), "settings": settings_digest(Experiment())}
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


def test_a_kill_between_two_renames_leaves_a_model_that_opens(models, tmp_path):
    """For the model of a run, test_training.py shows it. Version 0.2 gave it a name that could be the user's, too."""
    kind, _, _, expected = models["own"]
    for folder, name, left in ((tmp_path / "now", marked(f"{REPLACED}m-"), []), (tmp_path / "0.2", ".replaced-m", [1])):
        save_model(denoiser(network(kind)), folder / name)
        assert torch.equal(samples(folder / "m", kind), expected)
        save_model(denoiser(network(kind)), folder / "m")
        assert sorted(path.name for path in folder.iterdir()) == [*(name for _ in left), "m"]
        assert torch.equal(samples(folder / "m", kind), expected)


def test_names_that_are_long_or_not_utf_8(models, tmp_path):
    """They work wherever the system takes them, and are one sentence elsewhere."""
    kind, _, _, expected = models["unet"]
    names = [b"\xff\xfe", "Σ ß 日本".encode(), b"a b'c\"d", b"n" * 250, b"n" * 300, b"line\none", b"-x"]
    wrong = []
    for name in map(os.fsdecode, names):
        folder, out = tmp_path / name, str(tmp_path / "out") + name

        def there_and_back(folder: Path = folder) -> torch.Tensor:
            save_model(denoiser(network(kind)), folder)
            return samples(folder, kind)

        if problem := outcome(there_and_back, partial(torch.equal, expected)):
            wrong.append(f"{name!r}: {problem}")
        if main(["sample", str(folder), "--seeds", "0-1", "--num-steps", "2", "--out", out]) not in (0, 2):
            wrong.append(f"{name!r}: exit code")
    assert torch.equal(samples(tmp_path / os.fsdecode(names[0]), kind), expected)
    assert not wrong


def test_a_link_in_a_folder_of_samples_leads_to_no_file_of_ours(models, tmp_path, capsys):
    draw = ["sample", str(models["unet"][1]), "--num-steps", "3", "--format", "png", "--out"]
    assert main([*draw, str(tmp_path / "mine"), "--seeds", "0-3"]) == 0
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "000000.png").write_text("mine")
    for part in ("png", "parts"):
        folder = shutil.copytree(tmp_path / "mine", tmp_path / f"s-{part}", ignore=shutil.ignore_patterns(part))
        (folder / part).symlink_to(tmp_path / "precious")
        assert main([*draw, str(folder), "--seeds", "0-5"]) == 2
        assert part in capsys.readouterr().err
        assert [path.read_text() for path in (tmp_path / "precious").iterdir()] == ["mine"]


def test_two_that_save_one_model_take_turns(tmp_path):
    """In the folder is always one of them, whole."""

    def save(value: float) -> None:
        net = network("own")
        for parameter in net.parameters():
            torch.nn.init.constant_(parameter, value)
        for _ in range(5):
            save_model(denoiser(net), tmp_path / "m")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, (1.0, 2.0)))
    loaded = load_model(tmp_path / "m", network("own")).net
    assert torch.cat([parameter.detach().flatten() for parameter in loaded.parameters()]).unique().numel() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# A stranger's model ----------------------------------------------------------------------------------------------


INDEXES = {
    "a module": {"unet": ["evil", "X"]},
    "a module in a folder": {"unet": ["unet.evil", "X"], "scheduler": ["scheduler.evil", "X"]},
    "a pipeline": {"_class_name": ["pipeline", "X"]},
    "a pipeline in a folder": {"_class_name": ["unet/evil", "X"]},
    "a word": {"_class_name": "evil"},
    "another component": {"safety_checker": ["evil", "X"], "evil": ["evil", "X"]},
    "a class of diffusers": {"unet": ["diffusers", "DiffusionPipeline"]},
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
def test_a_strangers_code_is_never_run(tmp_path, monkeypatch):
    """Whatever the files name, no module is imported, and the folder gives its own network or a sentence. There are
    programs wherever diffusers, transformers or Python might look for them, which would leave a file."""
    place, trap = tmp_path / "m", tmp_path / "sprung"
    save_model(denoiser(network("unet")), place)
    (place / "manifest.json").unlink()
    code = f"import pathlib; pathlib.Path({str(trap)!r}).touch()\nclass UNet2DModel: pass\nX = UNet2DModel\n"
    names = ("evil", "pipeline", "unet", "scheduler", "modeling", "__init__", "diffusers", "my_pipeline", "hubconf")
    for folder in (place, place / "unet", place / "scheduler", place / "evil"):
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / f"{name}.py").write_text(code)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
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
    own, wrong = NonIsotropicScheduler.from_pretrained(place / "scheduler"), []
    NonIsotropicPipeline.from_pretrained(place)  # all that is needed has been imported
    modules = set(sys.modules)
    for file, change in cases:
        file.write_text(json.dumps({**before[file], **change}))
        for name, act in acts.items():
            if problem := outcome(act, lambda _: True):
                wrong.append(f"{name}, {file.name} {change}: {problem}")
        file.write_text(json.dumps(before[file]))
    for option in ("custom_pipeline", "trust_remote_code", "custom_revision", "device_map", "unet", "variant"):
        value = str(place / "pipeline.py") if option == "custom_pipeline" else True
        with refused(option):
            NonIsotropicPipeline.from_pretrained(place, **{option: value})
    new = {name for name in set(sys.modules) - modules if not name.startswith(("torch", "diffusers", "numpy"))}
    assert not trap.exists()
    assert not new
    assert not wrong, "\n".join(wrong[:5])
    exec(code, {})
    assert trap.exists()  # the trap works


def test_programs_are_not_fetched_from_the_hub():
    for name in ("model_index.json", "manifest.json", "unet/config.json", "unet/x.safetensors", "scheduler/x.json"):
        assert any(fnmatch(name, pattern) for pattern in FILES), name
    for name in ("pipeline.py", "unet/evil.py", "unet/x.bin", "scheduler/evil.py", "x.pkl", "unet/x.ckpt", "unet/x.pt"):
        assert not any(fnmatch(name, pattern) for pattern in FILES), name


NAMES = [
    'x")\nimport os; os.system("evil")#',
    "a | b | c",
    "```\n<script>alert(1)</script>\n```",
    "<img src=x onerror=alert(1)>",
    "![x](http://evil/track.png)",
    "[x](javascript:alert(1))",
    "line\none\r\ntwo\u2028three\x85four",
    "\\",
    "nul\x00bell\x07escape\x1b[31m",
    "not UTF-8 \udcff\udc80",
    "\u202egnp.exe",
    "`code`",
]


def test_a_card_is_text_whatever_is_in_its_names(tmp_path):
    """One row per fact, no markup, and a sample of code that is one string."""
    plain = denoiser(network("unet"))
    usual = model_card(plain, (1, 4, 4), {"data": "x", "y": "x"}, "x")
    for number, name in enumerate(NAMES):
        assert eval(python_text(name)) == name
        card = model_card(plain, (1, 4, 4), {"data": name, name: "x"}, name)
        assert len(card.splitlines()) == len(usual.splitlines()), name
        unescaped = re.sub(r"`[^`\n]*`|\\[|<\[`]", "", card)
        rows = [line for line in unescaped.splitlines() if line.startswith("|")]
        assert {row.count("|") for row in rows} == {3}
        assert not any(markup in unescaped for markup in ("<script", "<img", "[x]"))
        assert card.count("```") == 2
        card.encode()  # it is UTF-8
        save_model(plain, tmp_path / str(number), {"data": name})
        assert escaped(name) in (tmp_path / str(number) / "README.md").read_text(encoding="utf-8")
