"""Images from a network and a `NonIsotropicScheduler`: what `DDPMPipeline` is for white noise."""

import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.covariance.config import ARRAYS, names_arrays
from nidiff.covariance.matrix import Identity
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import as_tensor
from nidiff.diffusion.scaling import PIXELS
from nidiff.diffusion.schedule import as_schedule
from nidiff.errors import InputError, one_of
from nidiff.evaluation.results import known_results
from nidiff.evaluation.table import markdown
from nidiff.interop.config import DOWNLOAD
from nidiff.interop.scheduler import NonIsotropicScheduler
from nidiff.model.card import METRICS, model_card
from nidiff.model.config import ALGORITHMS
from nidiff.model.folder import (
    CONFIG,
    check_same_covariance,
    has_network,
    image_shape,
    load_model,
    read_json,
    save_model,
)
from nidiff.randomness import Generators, generators_from_seeds
from nidiff.sampling.sampler import SAMPLERS, default_steps

FILES = ("model_index.json", "README.md", "unet/*", "network/*", "scheduler/*")


class NonIsotropicPipeline(DiffusionPipeline):
    """A network that was trained under Σ and the scheduler that knows Σ. Under another Σ it is refused.

    The network is called as ``unet(x, timesteps)``. A model of diffusers says in its configuration what shape it makes;
    for any other module give ``image_shape`` (channels, height, width).
    """

    model_cpu_offload_seq: Any = "unet"
    unet: torch.nn.Module
    scheduler: NonIsotropicScheduler

    def __init__(
        self, unet: torch.nn.Module, scheduler: NonIsotropicScheduler, image_shape: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        _check_scheduler(scheduler)
        self._image_shape = _shape(unet, scheduler.covariance, image_shape)
        self.register_modules(unet=unet, scheduler=scheduler)
        if image_shape is not None:
            self.register_to_config(image_shape=list(self._image_shape))
        self._covariance = scheduler.covariance

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        generator: Generators = None,
        num_inference_steps: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        *,
        eta: float = 0.0,
        seeds: Sequence[int] | None = None,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Images in [0, 1]; if the scheduler has a scaling of other data than 8-bit images, data in their own units.

        Args:
            generator: one for the batch, or a list of one per image.
            num_inference_steps: default, that of `nidiff.sample` for the same algorithm: 20, and all levels for ddpm.
            output_type: "pil", "np" [B, H, W, C] or "pt" [B, C, H, W].
            eta: of algorithm "ddim".
            seeds: instead of a generator, one seed per image: the images of `nidiff.sample` with these seeds.
        """
        one_of("output_type", output_type, ("pil", "np", "pt"))
        self._check_own()
        scaling = self.scheduler.scaling or PIXELS
        if output_type == "pil" and (scaling != PIXELS or len(self._image_shape) != 3):
            raise InputError('output_type="pil" is for 8-bit images: use "np" or "pt" for these data.')
        if seeds is not None:
            if generator is not None or len(seeds) != batch_size:
                raise InputError(
                    f"seeds has {len(seeds)} entries: give batch_size={batch_size} of them and no generator."
                )
            generator = generators_from_seeds(seeds)
        if num_inference_steps is None:
            sampler = SAMPLERS[ALGORITHMS[self.scheduler.config["algorithm"]]]
            num_inference_steps = default_steps(sampler, self.scheduler.process.schedule)
        first = next(self.unet.parameters(), torch.zeros(()))
        device = self._execution_device if isinstance(self.unet, ModelMixin) else first.device
        self.scheduler.set_timesteps(num_inference_steps, device)
        shape = (batch_size, *self._image_shape)
        images = self.scheduler.init_noise(shape, generator, device, first.dtype)
        for t in self.progress_bar(self.scheduler.timesteps):
            output = as_tensor(self.unet(images, t.expand(batch_size)))
            images = self.scheduler.step(output, t, images, generator, return_dict=False, eta=eta)[0]
        result: Any = (images / 2 + 0.5).clamp(0, 1) if scaling == PIXELS else scaling.to_data(images)
        if output_type != "pt":
            result = result.cpu().float().movedim(1, -1).numpy()
        if output_type == "pil":
            result = self.numpy_to_pil(result)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=result) if return_dict else (result,)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        covariance: Covariance | None = None,
        scheduler: NonIsotropicScheduler | None = None,
        **kwargs: Any,
    ) -> "NonIsotropicPipeline":
        """Open a model folder, a run directory of `nidiff train` or a Hub repository.

        ``covariance`` only says what you expect: another than the model's own is refused, in ``scheduler`` too. A model
        of diffusers, trained with white noise, opens with a ``scheduler`` whose Σ is I. A network that is not of
        diffusers is passed as ``unet``, with its ``image_shape``: its weights are loaded.
        """
        name = str(pretrained_model_name_or_path)
        folder = Path(name)
        if (folder / "experiment.json").is_file():
            folder = folder / "model"
            if not has_network(folder):
                raise OSError(f"{name!r} is a run that has not ended: continue it with nidiff train --resume.")
        if not folder.exists() and (name.count("/") > 1 or folder.is_absolute()):
            raise OSError(f"{name!r} does not exist: give a model folder, a run directory or a Hub repository.")
        if not folder.exists():
            folder = Path(cls.download(name, **kwargs))  # here, so that the card comes along when it is saved again
        index = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
        libraries = {key: named[0] for key, named in index.items() if isinstance(named, list) and len(named) == 2}
        if libraries.get("scheduler", "diffusers") not in ("diffusers", NonIsotropicScheduler.__module__):
            raise InputError(
                f"{name!r} names the scheduler {index['scheduler']}, which is not imported: save it again."
            )
        if scheduler is not None:
            _check_scheduler(scheduler)
            if libraries.get("scheduler") == "diffusers":  # it was trained with white noise
                check_same_covariance(Identity(scheduler.covariance.event_shape), scheduler.covariance)
                kwargs["scheduler"] = scheduler
        kwargs.setdefault("use_safetensors", True)  # nothing is unpickled
        pipeline: NonIsotropicPipeline
        if libraries.get("unet", None if (folder / CONFIG).is_file() else "diffusers") == "diffusers":
            pipeline = super().from_pretrained(str(folder), **kwargs)
        else:  # diffusers would import the module that the file names
            net: Any = load_model(folder, net=kwargs.get("unet")).net
            own = NonIsotropicScheduler.from_pretrained(folder, subfolder="scheduler")
            pipeline = cls(net, own, kwargs.get("image_shape", index.get("image_shape")))
            pipeline.register_to_config(_name_or_path=str(folder))
        check_same_covariance(pipeline.scheduler.covariance, covariance)
        if scheduler is not None:
            check_same_covariance(pipeline.scheduler.covariance, scheduler.covariance)
            pipeline.scheduler = scheduler
        return pipeline

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """Fetch the files from the Hub: diffusers' own takes a scheduler/ with arrays for weights it does not know."""
        chosen = {key: kwargs[key] for key in DOWNLOAD if kwargs.get(key) is not None}
        try:
            return snapshot_download(pretrained_model_name, allow_patterns=list(FILES), **chosen)
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise OSError(
                f"{pretrained_model_name!r} is neither a folder here nor within reach on the Hub: give a model folder, "
                "a run directory or a Hub repository."
            ) from error

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the model, its scheduler with Σ and a model card. A README.md that is there stays, unless it came with
        another model."""
        self._check_own()
        folder = Path(save_directory)
        card, before, origin = folder / "README.md", _described(folder), _described(self._origin())
        if isinstance(self.unet, ModelMixin):
            super().save_pretrained(save_directory, *args, **kwargs)
        else:
            save_model(self.scheduler.denoiser(self.unet), folder)
        now = _described(folder)
        if not card.exists() or before not in (None, now):
            self._write_card(card, folder.resolve().name, origin == now)

    def _upload_folder(self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """The last act of ``push_to_hub``: our card goes in the place of diffusers' empty one."""
        folder = Path(working_dir)
        self._write_card(folder / "README.md", repo_id, _described(self._origin()) == _described(folder))
        return super()._upload_folder(working_dir, repo_id, *args, **kwargs)

    def _check_own(self) -> None:
        """The scheduler is an attribute: it may have been replaced."""
        _check_scheduler(self.scheduler)
        check_same_covariance(self._covariance, self.scheduler.covariance)

    def _origin(self) -> Path:
        """The folder that the model was opened from."""
        return Path(getattr(self, "name_or_path", None) or os.devnull)

    def _write_card(self, file: Path, name: str, unchanged: bool) -> None:
        """The card that the model came with if it is ``unchanged``, else one of what is known. If the model lies in a
        run, its metrics are those of today."""
        origin, run = self._origin(), self._origin().resolve().parent
        if unchanged and (origin / "README.md").is_file():
            card = (origin / "README.md").read_text(encoding="utf-8")
            opening = re.compile(r'NonIsotropicPipeline\.from_pretrained\("[^"]*"\)')
            text = opening.sub(lambda _: f'NonIsotropicPipeline.from_pretrained("{name}")', card)
        else:
            text = model_card(self.scheduler.covariance, self.scheduler.config, name=name)
        if unchanged and (run / "experiment.json").is_file() and (results := known_results(run)):
            text = text.partition(METRICS)[0] + METRICS + markdown(results)
        file.write_text(text, encoding="utf-8")


def _shape(unet: Any, covariance: Covariance, given: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of one image, of the network's own configuration or as it is ``given``."""
    if not isinstance(unet, torch.nn.Module):
        raise InputError(f"unet is a {type(unet).__name__}: give a torch.nn.Module.")
    if given is None:
        return image_shape(unet, covariance)
    try:
        shape = tuple(operator.index(size) for size in given)
    except TypeError as error:
        raise InputError(f"image_shape={given!r} must be integers, such as (3, 32, 32).") from error
    covariance.check_trailing(shape, "image_shape")
    return shape


def _check_scheduler(scheduler: Any) -> None:
    if not isinstance(scheduler, NonIsotropicScheduler):
        raise InputError(
            f"scheduler is a {type(scheduler).__name__}, which knows no Σ: give a NonIsotropicScheduler, or run it in "
            "whitened coordinates (nidiff.interop.whitened)."
        )


def _described(folder: Path) -> list[object] | None:
    """What a card says of the model in the folder: Σ, schedule and prediction; None if there is no model."""
    file = folder / CONFIG
    if not file.is_file():
        return None
    try:
        config = read_json(file)
        schedule = as_schedule(config.get("schedule", "")).to_config()  # version 0.1 wrote it as text
    except InputError:
        return []
    arrays = file.with_name(ARRAYS)
    said = [config.get("covariance"), schedule, config.get("prediction_type")]
    return [*said, arrays.read_bytes() if names_arrays(config.get("covariance")) and arrays.is_file() else None]
