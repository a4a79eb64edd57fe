"""Images from a network and a `NonIsotropicScheduler`: what `DDPMPipeline` is for white noise."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput

from nidiff.covariance.matrix import Identity
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import as_tensor
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError, one_of
from nidiff.evaluation.results import known_results
from nidiff.evaluation.table import markdown
from nidiff.interop.config import downloaded
from nidiff.interop.scheduler import NonIsotropicScheduler
from nidiff.model.card import FRONT, METRICS, model_card, model_facts
from nidiff.model.config import ALGORITHMS, read_json
from nidiff.model.folder import check_same_covariance, image_shape, whole_model
from nidiff.randomness import Generators, generators_from_seeds
from nidiff.sampling.sampler import SAMPLERS, default_steps

FILES = ("model_index.json", "README.md", "unet/*", "scheduler/*")
LIBRARIES = (["diffusers"], [NonIsotropicScheduler.__module__])  # diffusers would import any that a file names


class NonIsotropicPipeline(DiffusionPipeline):
    """A diffusers model that was trained under Σ and the scheduler that knows Σ. Under another Σ it is refused.

    It makes images; for a network or data of another kind there are `nidiff.sample` and `nidiff.save_model`.
    """

    model_cpu_offload_seq: Any = "unet"
    unet: torch.nn.Module
    scheduler: NonIsotropicScheduler

    def __init__(self, unet: torch.nn.Module, scheduler: NonIsotropicScheduler) -> None:
        super().__init__()
        _check_scheduler(scheduler)
        self._covariance, self._image_shape = scheduler.covariance, image_shape(unet, scheduler.covariance)
        if len(self._image_shape) != 3 or scheduler.scaling not in (None, PIXELS):
            raise InputError("NonIsotropicPipeline is for 8-bit images: use nidiff.load_model and nidiff.sample.")
        self.register_modules(unet=unet, scheduler=scheduler)

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
            num_inference_steps: default, that of `nidiff.sample` for the same algorithm: 20, and all levels for ddpm.
            output_type: "pil", "np" [B, H, W, C] or "pt" [B, C, H, W].
            eta: of algorithm "ddim".
            seeds: instead of a generator, one seed per image: the images of `nidiff.sample` with these seeds.
        """
        one_of("output_type", output_type, ("pil", "np", "pt"))
        self._check_own()
        if seeds is not None:
            if generator is not None or len(seeds) != batch_size:
                raise InputError(f"seeds has {len(seeds)} entries: give batch_size={batch_size}, and no generator.")
            generator = generators_from_seeds(seeds)
        if num_inference_steps is None:
            sampler = SAMPLERS[ALGORITHMS[self.scheduler.config["algorithm"]]]
            num_inference_steps = default_steps(sampler, self.scheduler.process.schedule)
        device, dtype = self._execution_device, next(self.unet.parameters()).dtype
        self.scheduler.set_timesteps(num_inference_steps, device)
        images = self.scheduler.init_noise((batch_size, *self._image_shape), generator, device, dtype)
        for t in self.progress_bar(self.scheduler.timesteps):
            output = as_tensor(self.unet(images, t.expand(batch_size)))
            images = self.scheduler.step(output, t, images, generator, return_dict=False, eta=eta)[0]
        result: Any = (images / 2 + 0.5).clamp(0, 1)
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
        of diffusers, trained with white noise, opens with a ``scheduler`` whose Σ is I.
        """
        folder = Path(pretrained_model_name_or_path)
        folder = whole_model(folder) if folder.exists() else downloaded(str(folder), FILES, kwargs)
        index = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
        named = [index.get(part) for part in ("unet", "scheduler")]
        if isinstance(name := index.get("_class_name"), list):  # a file in the folder that diffusers would run
            raise InputError(f"{str(folder)!r} names code to run ({name}), which is not done: use nidiff.load_model.")
        if not all(isinstance(one, list) and one[:1] in LIBRARIES for one in named):
            raise InputError(
                f"{str(folder)!r} has no model_index.json that names a network and a scheduler of diffusers or nidiff, "
                f"but {named}: use nidiff.load_model and nidiff.sample for a network of your own."
            )
        if scheduler is not None:
            _check_scheduler(scheduler)
            white = index["scheduler"][0] == "diffusers"  # the noise it was trained with
            own = Identity(scheduler.covariance.event_shape) if white else Covariance.load(folder)
            check_same_covariance(own, scheduler.covariance)
            kwargs["scheduler"] = scheduler
        kwargs.setdefault("use_safetensors", True)  # nothing is unpickled
        pipeline: NonIsotropicPipeline = super().from_pretrained(str(folder), **kwargs)
        check_same_covariance(pipeline.scheduler.covariance, covariance)
        return pipeline

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the network, its scheduler with Σ and a model card. A README.md is kept, unless it is the card of
        another model."""
        self._check_own()
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        if self._kept_card(folder) is None:
            self._write_card(folder, folder.resolve().name)

    def _upload_folder(self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """The last act of ``push_to_hub``: our card goes in the place of diffusers' empty one."""
        self._write_card(Path(working_dir), repo_id)
        return super()._upload_folder(working_dir, repo_id, *args, **kwargs)

    def _check_own(self) -> None:
        """The scheduler is an attribute: it may have been replaced."""
        _check_scheduler(self.scheduler)
        check_same_covariance(self._covariance, self.scheduler.covariance)

    def _kept_card(self, folder: Path) -> str | None:
        """README.md of the folder, unless it is our card of another model."""
        file, facts = folder / "README.md", model_facts(self.scheduler.covariance, self.scheduler.config)
        text = file.read_text(encoding="utf-8") if file.is_file() else None
        return None if text is None or (text.startswith(FRONT) and facts not in text) else text

    def _write_card(self, folder: Path, name: str) -> None:
        """Write the card that the model came with, with the metrics of its run; or a new one if it has none."""
        origin = Path(self.name_or_path or os.devnull).resolve()
        run = origin.parent
        text = self._kept_card(origin)
        if text is None:
            text = model_card(self.scheduler.covariance, self.scheduler.config, name=name)
        elif (run / "experiment.json").is_file() and (results := known_results(run)):
            text = text.partition(METRICS)[0] + METRICS + markdown(results)
        text = re.sub(r'(?<=NonIsotropicPipeline\.from_pretrained\(")[^"]*', lambda _: name, text)
        (folder / "README.md").write_text(text, encoding="utf-8")


def _check_scheduler(scheduler: Any) -> None:
    if not isinstance(scheduler, NonIsotropicScheduler):
        raise InputError(
            f"scheduler is a {type(scheduler).__name__}, which knows no Σ: give a NonIsotropicScheduler, or run it in "
            "whitened coordinates (nidiff.interop.whitened)."
        )
