"""Images from a network and a `NonIsotropicScheduler`: what `DDPMPipeline` is for white noise."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Identity
from nidiff.diffusion.condition import CLASSES, check_not_missing, count_rows, needed_conditions
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError, one_of, shown
from nidiff.evaluation.results import known_results
from nidiff.evaluation.table import markdown
from nidiff.files import as_path, locked, read_object, replace_text, writing
from nidiff.interop.config import DOWNLOAD, downloaded
from nidiff.interop.scheduler import NonIsotropicScheduler
from nidiff.model.card import FRONT, METRICS, model_card, model_facts, python_text
from nidiff.model.config import ALGORITHMS, model_folder
from nidiff.model.folder import check_same_covariance, image_shape, whole_model
from nidiff.model.manifest import INDEX, MANIFEST, PARTS, write_manifest
from nidiff.model.network import NETWORKS, OTHER, load_network
from nidiff.model.sampling import SAMPLING
from nidiff.model.zoo import find_model, zoo_models
from nidiff.randomness import Generators, generators_from_seeds
from nidiff.sampling.sampler import SAMPLERS, default_steps

LOADABLE_CLASSES["nidiff.model.unet"] = {"FieldUNet": ["save_pretrained", "from_pretrained"]}  # how diffusers saves it

# What is fetched from the Hub: never a program.
FILES = (
    INDEX,
    MANIFEST,
    SAMPLING,
    "README.md",
    *(f"{part}/*.{kind}" for part in PARTS for kind in ("json", "safetensors")),
)


class NonIsotropicPipeline(DiffusionPipeline):
    """A diffusers model that was trained under Σ and the scheduler that knows Σ. Under another Σ it is refused.

    It makes images; for a network or data of another kind there are `nidiff.sample` and `nidiff.save_model`.
    """

    model_cpu_offload_seq: Any = "unet"
    unet: torch.nn.Module
    scheduler: NonIsotropicScheduler
    _origin: Path | None = None  # the folder that it was opened from

    def __init__(self, unet: torch.nn.Module, scheduler: NonIsotropicScheduler) -> None:
        super().__init__()
        self._covariance = _checked(scheduler).covariance
        self._image_shape = image_shape(unet, self._covariance)
        if len(self._image_shape) != 3 or scheduler.scaling not in (None, PIXELS):
            remedy = "use nidiff.load_model and nidiff.sample"
            raise InputError("unet", None, "does not make 8-bit images, which this pipeline is for", remedy)
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int | None = None,
        generator: Generators = None,
        num_inference_steps: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        *,
        eta: float = 0.0,
        seeds: Sequence[int] | None = None,
        class_labels: Any = None,
        guidance_scale: float = 1.0,
        null: Mapping[str, Any] | None = None,
        interval: tuple[float, float] | None = None,
        **conditions: Any,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Images in [0, 1].

        Args:
            batch_size: default, as many as there are seeds or rows of a condition, or 1.
            generator: one for the batch, or a list of one per image.
            num_inference_steps: default, that of `nidiff.sample` for the same algorithm: 20, 10 for angles, and all
                levels for ddpm.
            output_type: "pil", "np" [B, H, W, C], "pt" [B, C, H, W], or "latent": as "pt", but what the network makes
                itself, neither clipped nor moved from [−1, 1] to [0, 1].
            eta: of algorithm "ddim".
            seeds: instead of a generator, one seed per image: the images of `nidiff.sample` with these seeds.
            class_labels: one per image, or one for all; like ``conditions``, whatever else the network takes beside x
                and the level (encoder_hidden_states, …), as in `nidiff.Denoiser.given`.
            guidance_scale: of classifier-free guidance, x̂0(null) + guidance_scale (x̂0(conditions) − x̂0(null)): 1 is
                none. The formula of diffusers' pipelines; ``null`` and ``interval`` are those of `Denoiser.guided`.
        """
        one_of("output_type", output_type, ("pil", "np", "pt", "latent"))
        _checked(self.scheduler, self._covariance)
        if class_labels is not None:
            conditions[CLASSES] = class_labels
        denoiser = self._conditioned(conditions, guidance_scale, null, interval)
        if batch_size is None:
            batch_size = len(seeds or ()) or max(map(count_rows, conditions.values()), default=1)
        if seeds is not None:
            generator = generators_from_seeds(seeds)
        if num_inference_steps is None:
            sampler = SAMPLERS[ALGORITHMS[self.scheduler.config["algorithm"]]]
            num_inference_steps = default_steps(sampler, self.scheduler.process.schedule)
        device, dtype = self._execution_device, next(self.unet.parameters()).dtype
        self.scheduler.set_timesteps(num_inference_steps)  # on the CPU, where their levels are
        images = self.scheduler.init_noise((batch_size, *self._image_shape), generator, device, dtype)
        for t in self.progress_bar(self.scheduler.timesteps):
            images = self.scheduler.step_with(denoiser, t, images, generator, eta=eta).prev_sample
        result: Any = images if output_type == "latent" else (images / 2 + 0.5).clamp(0, 1)
        if output_type in ("pil", "np"):
            result = result.cpu().float().movedim(1, -1).numpy()
        if output_type == "pil":
            result = self.numpy_to_pil(result)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=result) if return_dict else (result,)

    def _conditioned(self, conditions: Mapping[str, Any], scale: float, null: Any, interval: Any) -> Denoiser:
        """The model as a denoiser with conditions and guidance."""
        denoiser = self.scheduler.denoiser(self.unet).given(**conditions)
        check_not_missing(denoiser.conditions, conditions)
        known = {**denoiser.conditions, **conditions}
        if missing := [name for name in needed_conditions(self.unet) if name not in known]:
            remedy = "give one row per image, or one for all"
            raise InputError(missing[0], None, "is missing, which the network needs", remedy)
        return denoiser if scale == 1 else denoiser.guided(scale, null=null, interval=interval)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        covariance: Covariance | None = None,
        scheduler: NonIsotropicScheduler | None = None,
        **kwargs: Any,
    ) -> "NonIsotropicPipeline":
        """Open a model folder, a run directory of `nidiff train`, a model that ships, by its name, or a Hub repository.

        ``covariance`` only says what you expect: another than the model's own is refused, in ``scheduler`` too. A model
        of diffusers, trained with white noise, opens with a ``scheduler`` whose Σ is I. Other options are
        ``torch_dtype`` and those about fetching (``revision``, ``token``, ``cache_dir``, …). Whatever the files name,
        only code of diffusers and nidiff is run.
        """
        if other := [key for key in kwargs if key not in (*DOWNLOAD, "torch_dtype", "use_safetensors")]:
            problem = "is not an option here, where known classes are loaded from safetensors and JSON"
            raise InputError(other[0], None, problem, "leave it out")
        folder = model_folder(as_path("pretrained_model_name_or_path", pretrained_model_name_or_path))
        if not folder.exists() and str(folder) in zoo_models():
            folder = model_folder(find_model(folder))
        folder = whole_model(folder if folder.exists() else downloaded(folder, FILES, kwargs))
        white = _is_white(folder)
        if scheduler is None and not white:
            scheduler = NonIsotropicScheduler.from_pretrained(folder / "scheduler")
        scheduler = _checked(scheduler)  # a model of diffusers needs one
        stored = Identity(scheduler.covariance.event_shape) if white else Covariance.load(folder)
        for expected in (scheduler.covariance, covariance):
            check_same_covariance(stored, expected)
        pipeline = cls(load_network(folder).to(kwargs.get("torch_dtype")), scheduler)
        pipeline._origin = folder
        return pipeline

    @classmethod
    def download(cls, pretrained_model_name: str | os.PathLike[str], **kwargs: Any) -> str:
        """Fetch a model from the Hub, without opening it: the same files as `from_pretrained` reads."""
        return str(downloaded(as_path("pretrained_model_name", pretrained_model_name), FILES, kwargs))

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write network, scheduler, manifest and card. A README.md stays, unless it is the card of another model."""
        _checked(self.scheduler, self._covariance)
        folder = as_path("save_directory", save_directory)
        if kwargs.get("safe_serialization", True) is not True or kwargs.get("variant") is not None:
            remedy = "leave out safe_serialization and variant"
            raise InputError("save_pretrained", None, "writes safetensors of one kind", remedy)
        if folder.is_file() or (folder / OTHER).exists():
            raise InputError("save_directory", folder, "holds something else", "choose a new folder")
        with writing("save_directory", folder), locked(folder):  # two that save here at once take turns
            super().save_pretrained(folder, **kwargs)
            if self._card_in(folder) is None:
                self._write_card(folder, folder.resolve().name)
            write_manifest(folder)

    def _upload_folder(self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """The last act of ``push_to_hub``: our card goes in the place of diffusers' empty one."""
        self._write_card(Path(working_dir), repo_id)
        write_manifest(Path(working_dir))
        return super()._upload_folder(working_dir, repo_id, *args, **kwargs)

    def _card_in(self, folder: Path | None) -> str | None:
        """README.md of a folder, unless it is our card of another model."""
        if folder is None or not (folder / "README.md").is_file():
            return None
        text = (folder / "README.md").read_text(encoding="utf-8", errors="surrogateescape")
        facts = model_facts(self.scheduler.denoiser(self.unet))
        return None if text.startswith(FRONT) and facts not in text else text

    def _write_card(self, folder: Path, name: str) -> None:
        """Write the card that the model came with, with the metrics of its run; or a new one if it has none."""
        text = self._card_in(self._origin)
        run = None if self._origin is None else self._origin.resolve().parent
        if text is None:
            text = model_card(self.scheduler.denoiser(self.unet), self._image_shape, name=name)
        elif run is not None and (run / "experiment.json").is_file() and (results := known_results(run)):
            text = text.partition(METRICS)[0] + METRICS + markdown(results)
        text = re.sub(r'(?<=NonIsotropicPipeline\.from_pretrained\()"[^"\n]*"', lambda _: python_text(name), text)
        replace_text(folder / "README.md", text)


def _is_white(folder: Path) -> bool:
    """Whether the model is diffusers' own, with white noise. Classes that we do not know are refused, not imported."""
    index = read_object(folder / INDEX) if (folder / INDEX).is_file() else {}
    kind, network, scheduler = (index.get(key) for key in ("_class_name", "unet", "scheduler"))
    ours = [NonIsotropicScheduler.__module__, NonIsotropicScheduler.__name__]
    white = isinstance(scheduler, list) and len(scheduler) == 2 and scheduler[0] == "diffusers"
    known = [[place if isinstance(place, str) else "diffusers", name] for name, place in NETWORKS.items()]
    if isinstance(kind, list) or network not in known or not (white or scheduler == ours):
        problem = f"does not name a pipeline, network and scheduler of ours but {shown([kind, network, scheduler])}"
        raise InputError("file", folder / INDEX, problem, "use nidiff.load_model; no code of a model is run")
    return white


def _checked(scheduler: Any, covariance: Covariance | None = None) -> NonIsotropicScheduler:
    """The scheduler, which is an attribute that anybody may replace, if it is ours and has this Σ."""
    if not isinstance(scheduler, NonIsotropicScheduler):
        remedy = "give a NonIsotropicScheduler (with Σ = Identity for white noise), or use nidiff.interop.Whitened"
        raise InputError("scheduler", None, f"is a {type(scheduler).__name__}, which knows no Σ", remedy)
    if hasattr(scheduler, "sigmas"):
        remedy = "use the pipeline of the model, such as StableDiffusion3Pipeline, or nidiff.sample"
        raise InputError("scheduler", None, "is of flow matching, whose networks this pipeline does not call", remedy)
    if covariance is not None:
        check_same_covariance(covariance, scheduler.covariance)
    return scheduler
