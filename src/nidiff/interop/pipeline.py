"""Unconditional images from a U-Net and a `NonIsotropicScheduler`: what `DDPMPipeline` is for white noise."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.covariance.config import ARRAYS, FileError, names_arrays
from nidiff.covariance.matrix import Identity
from nidiff.covariance.operator import Covariance
from nidiff.errors import InputError, one_of
from nidiff.evaluation.results import known_results
from nidiff.evaluation.table import markdown
from nidiff.interop.config import DOWNLOAD
from nidiff.interop.scheduler import NonIsotropicScheduler
from nidiff.model.card import model_card, run_card
from nidiff.model.folder import CONFIG, check_same_covariance, image_shape, read_json
from nidiff.randomness import Generators, generators_from_seeds

FILES = ("model_index.json", "README.md", "unet/*", "scheduler/*")


class NonIsotropicPipeline(DiffusionPipeline):
    """A U-Net that was trained under Σ and the scheduler that knows Σ. Under another Σ it is refused."""

    model_cpu_offload_seq: Any = "unet"
    unet: UNet2DModel
    scheduler: NonIsotropicScheduler

    def __init__(self, unet: UNet2DModel, scheduler: NonIsotropicScheduler) -> None:
        super().__init__()
        _check_scheduler(scheduler)
        self._image_shape = image_shape(unet, scheduler.covariance)
        self.register_modules(unet=unet, scheduler=scheduler)
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
        """Images in [0, 1].

        Args:
            generator: one for the batch, or a list of one per image.
            num_inference_steps: default, all levels of the schedule.
            output_type: "pil", "np" [B, H, W, C] or "pt" [B, C, H, W].
            eta: of algorithm "ddim".
            seeds: instead of a generator, one seed per image: the images of `nidiff.sample` with these seeds.
        """
        one_of("output_type", output_type, ("pil", "np", "pt"))
        self._check_own()
        if seeds is not None:
            if generator is not None or len(seeds) != batch_size:
                raise InputError(
                    f"seeds has {len(seeds)} entries: give batch_size={batch_size} of them and no generator."
                )
            generator = generators_from_seeds(seeds)
        every = range(len(self.scheduler) - 1, -1, -1) if num_inference_steps is None else None
        self.scheduler.set_timesteps(num_inference_steps, self._execution_device, every)
        shape = (batch_size, *self._image_shape)
        images = self.scheduler.init_noise(shape, generator, self._execution_device, self.unet.dtype)
        for t in self.progress_bar(self.scheduler.timesteps):
            output = self.unet(images, t).sample
            images = self.scheduler.step(output, t, images, generator, return_dict=False, eta=eta)[0]
        result: Any = (images / 2 + 0.5).clamp(0, 1)
        if output_type != "pt":
            result = result.cpu().float().permute(0, 2, 3, 1).numpy()
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
        of diffusers, trained with white noise, opens with a ``scheduler`` whose Σ is I.
        """
        name = str(pretrained_model_name_or_path)
        folder = Path(name)
        if (folder / "experiment.json").is_file():
            folder = folder / "model"
            if not folder.is_dir():
                raise OSError(f"{name!r} is a run without a model: go on with it by nidiff train --resume.")
        if not folder.exists() and (name.count("/") > 1 or folder.is_absolute()):
            raise OSError(f"{name!r} does not exist: give a model folder, a run directory or a Hub repository.")
        if not folder.exists():
            folder = Path(cls.download(name, **kwargs))  # here, so that the card comes along when it is saved again
        if scheduler is not None:
            _check_scheduler(scheduler)
            if _is_white(folder):
                check_same_covariance(Identity(scheduler.covariance.event_shape), scheduler.covariance)
                kwargs["scheduler"] = scheduler
        kwargs.setdefault("use_safetensors", True)  # nothing is unpickled
        pipeline: NonIsotropicPipeline = super().from_pretrained(str(folder), **kwargs)
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
        super().save_pretrained(save_directory, *args, **kwargs)
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
        """The card of the run that the model came from, else the card it came with if it is ``unchanged``, else one of
        what is known."""
        origin = self._origin()
        known = self.scheduler.covariance, self.scheduler.config
        text = None
        if origin.is_dir():
            run = origin.resolve().parent
            results = known_results(run)
            text = run_card(run, *known, markdown(results) if results else "", name)
        if text is None and unchanged and (origin / "README.md").is_file():
            card = (origin / "README.md").read_text(encoding="utf-8")
            opening = re.compile(r'NonIsotropicPipeline\.from_pretrained\("[^"]*"\)')
            text = opening.sub(lambda _: f'NonIsotropicPipeline.from_pretrained("{name}")', card)
        file.write_text(text or model_card(*known, name=name), encoding="utf-8")


def _check_scheduler(scheduler: Any) -> None:
    if not isinstance(scheduler, NonIsotropicScheduler):
        raise InputError(
            f"scheduler is a {type(scheduler).__name__}, which knows no Σ: give a NonIsotropicScheduler, or run it in "
            "whitened coordinates (nidiff.interop.whitened)."
        )


def _is_white(folder: Path) -> bool:
    """Whether the folder holds a model with a scheduler of diffusers, which has been trained with white noise."""
    index = folder / "model_index.json"
    named = read_json(index).get("scheduler") if index.is_file() else None
    return isinstance(named, list) and named[-1:] != [NonIsotropicScheduler.__name__]


def _described(folder: Path) -> list[object] | None:
    """What a card says of the model in the folder: Σ, schedule and prediction; None if there is no model."""
    file = folder / "scheduler" / CONFIG
    if not file.is_file():
        return None
    try:
        config = read_json(file)
    except FileError:
        return []
    arrays = file.with_name(ARRAYS)
    said = [config.get(key) for key in ("covariance", "schedule", "prediction_type")]
    return [*said, arrays.read_bytes() if names_arrays(config.get("covariance")) and arrays.is_file() else None]
