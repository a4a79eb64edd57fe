"""The named schedules, their registry, and `as_schedule`, which reads text and configurations."""

from nidiff.diffusion.schedules import SCHEDULES as SCHEDULES
from nidiff.diffusion.schedules import as_schedule as as_schedule
from nidiff.diffusion.schedules import blue as blue
from nidiff.diffusion.schedules import blurring as blurring
from nidiff.diffusion.schedules import ddpm_cosine as ddpm_cosine
from nidiff.diffusion.schedules import ddpm_linear as ddpm_linear
from nidiff.diffusion.schedules import designed as designed
from nidiff.diffusion.schedules import equal_snr as equal_snr
from nidiff.diffusion.schedules import flow as flow
from nidiff.diffusion.schedules import from_alphas_cumprod as from_alphas_cumprod
from nidiff.diffusion.schedules import from_betas as from_betas
from nidiff.diffusion.schedules import heat as heat
from nidiff.diffusion.schedules import offset_ramp as offset_ramp
from nidiff.diffusion.schedules import scaled_linear as scaled_linear
from nidiff.diffusion.schedules import schedule_facts as schedule_facts
from nidiff.diffusion.schedules import smld_geometric as smld_geometric
from nidiff.diffusion.schedules import soft_conditioning as soft_conditioning
from nidiff.diffusion.schedules import table as table
from nidiff.diffusion.schedules import ve as ve
from nidiff.diffusion.schedules import vp as vp
