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

from nidiff.covariance.operator import Covariance
from nidiff.errors import InputError, one_of
from nidiff.interop.arrays import DOWNLOAD
from nidiff.interop.scheduler import NonIsotropicScheduler
from nidiff.randomness import Generators, generators_from_seeds
from nidiff.report.card import model_card, run_card
from nidiff.training.model import check_same_covariance

FILES = ("model_index.json", "README.md", "unet/*", "scheduler/*")


class NonIsotropicPipeline(DiffusionPipeline):
    """A U-Net that was trained under Σ and the scheduler that knows Σ. Under another Σ it is refused."""

    model_cpu_offload_seq: Any = "unet"
    unet: UNet2DModel
    scheduler: NonIsotropicScheduler

    def __init__(self, unet: UNet2DModel, scheduler: NonIsotropicScheduler) -> None:
        super().__init__()
        _check_scheduler(scheduler)
        size = unet.config["sample_size"]
        if size is None:
            raise InputError("unet has no sample_size in its configuration: build it with sample_size=(height, width).")
        shape = (unet.config["in_channels"], *((size, size) if isinstance(size, int) else size))
        event = scheduler.covariance.event_shape
        if shape[-len(event) :] != event:
            raise InputError(f"covariance is over {event}, but the U-Net makes images {shape}: build Σ for that shape.")
        self.register_modules(unet=unet, scheduler=scheduler)
        self._covariance = scheduler.covariance
        self._image_shape = shape

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
        _check_scheduler(self.scheduler)
        check_same_covariance(self._covariance, self.scheduler.covariance)
        if seeds is not None:
            if generator is not None or len(seeds) != batch_size:
                raise InputError(
                    f"seeds has {len(seeds)} entries: give batch_size={batch_size} of them and no generator."
                )
            generator = generators_from_seeds(seeds)
        steps = len(self.scheduler) if num_inference_steps is None else num_inference_steps
        self.scheduler.set_timesteps(steps, device=self._execution_device)
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

        ``covariance`` only says what you expect: another than the model's own is refused, in ``scheduler`` too.
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
        kwargs.setdefault("use_safetensors", True)  # nothing is unpickled
        pipeline: NonIsotropicPipeline = super().from_pretrained(str(folder), **kwargs)
        check_same_covariance(pipeline.scheduler.covariance, covariance)
        if scheduler is not None:
            _check_scheduler(scheduler)
            check_same_covariance(pipeline.scheduler.covariance, scheduler.covariance)
            pipeline.scheduler = scheduler
        return pipeline

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """Fetch the files from the Hub: diffusers' own takes a scheduler/ with arrays for weights it does not know."""
        chosen = {key: kwargs[key] for key in DOWNLOAD if kwargs.get(key) is not None}
        return snapshot_download(pretrained_model_name, allow_patterns=list(FILES), **chosen)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the model, its scheduler with Σ and, if there is none yet, a model card."""
        super().save_pretrained(save_directory, *args, **kwargs)
        card = Path(save_directory) / "README.md"
        if not card.exists():
            self._write_card(card, card.parent.name)

    def _upload_folder(self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """The last act of ``push_to_hub``: our card goes in the place of diffusers' empty one."""
        self._write_card(Path(working_dir) / "README.md", repo_id)
        return super()._upload_folder(working_dir, repo_id, *args, **kwargs)

    def _write_card(self, file: Path, name: str) -> None:
        """The card of the run that the model came from, else the card it came with, else one of what is known."""
        opened = Path(getattr(self, "name_or_path", None) or os.devnull)
        known = self.scheduler.covariance, self.scheduler.config
        text = run_card(opened, *known, name) if opened.is_dir() else None
        if text is None and (opened / "README.md").is_file():
            card = (opened / "README.md").read_text(encoding="utf-8")
            text = re.sub(r'(NonIsotropicPipeline\.from_pretrained)\("[^"]*"\)', rf'\1("{name}")', card)
        file.write_text(text or model_card(*known, name=name), encoding="utf-8")


def _check_scheduler(scheduler: Any) -> None:
    if not isinstance(scheduler, NonIsotropicScheduler):
        raise InputError(
            f"scheduler is a {type(scheduler).__name__}, which knows no Σ: give a NonIsotropicScheduler, or run it in "
            "whitened coordinates (nidiff.interop.whitened)."
        )
