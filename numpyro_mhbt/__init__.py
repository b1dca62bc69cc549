"""Mini-batch Metropolis-Hastings with batch tempering for NumPyro."""

from numpyro_mhbt import plots
from numpyro_mhbt.checkpoint import Checkpoint
from numpyro_mhbt.control import Taylor
from numpyro_mhbt.convert import to_arviz
from numpyro_mhbt.diagnostics import BatchReport, batch_report
from numpyro_mhbt.disk import DiskRows
from numpyro_mhbt.kernel import MHBT
from numpyro_mhbt.likelihood import log_likelihood
from numpyro_mhbt.plates import full_data
from numpyro_mhbt.posterior import Untempered, untemper
from numpyro_mhbt.proposals import RSGLD, SGLD, BetaSchedule, RandomWalk
from numpyro_mhbt.state import MHBTState

__all__ = [
    "MHBT",
    "RSGLD",
    "SGLD",
    "BatchReport",
    "BetaSchedule",
    "Checkpoint",
    "DiskRows",
    "MHBTState",
    "RandomWalk",
    "Taylor",
    "Untempered",
    "batch_report",
    "full_data",
    "log_likelihood",
    "plots",
    "to_arviz",
    "untemper",
]
__version__ = "0.1.0"
