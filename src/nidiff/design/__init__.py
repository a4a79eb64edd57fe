"""What the data and a network say about the noise: noise scales, κ, predicted errors, and a comparison of Σ."""

from nidiff.design.candidates import Candidate as Candidate
from nidiff.design.candidates import Design as Design
from nidiff.design.candidates import compare as compare
from nidiff.design.kappa import measure_kappa as measure_kappa
from nidiff.design.prediction import Prediction as Prediction
from nidiff.design.prediction import predict as predict
from nidiff.design.samplers import sampler_candidates as sampler_candidates
from nidiff.design.scales import Calibration as Calibration
from nidiff.design.scales import calibrate as calibrate
from nidiff.diffusion.gaussian import Kappa as Kappa
from nidiff.diffusion.mixture import MixtureModel as MixtureModel
from nidiff.sampling.warm import start_loss as start_loss
from nidiff.sampling.warm import start_row as start_row
